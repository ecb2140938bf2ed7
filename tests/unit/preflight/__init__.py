"""Tests of what `tandem preflight` finds."""
