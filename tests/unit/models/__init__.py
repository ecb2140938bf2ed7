"""Tests of the demo model and its recipe."""
