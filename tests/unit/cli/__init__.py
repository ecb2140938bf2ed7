"""Tests of the tandem command."""
