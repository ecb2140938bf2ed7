"""Bringing a prompt's prefix from peers and store nodes."""
