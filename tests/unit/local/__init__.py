"""Tests of the local cluster launcher."""
