"""Tokens from logits, with random numbers that depend on (seed, position) alone."""
