"""Tests of shared/bench."""
