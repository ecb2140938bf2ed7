"""Tests of the router's edge, with a scripted core behind it."""
