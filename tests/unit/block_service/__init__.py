"""Blocks between workers and store nodes."""
