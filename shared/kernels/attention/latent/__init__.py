"""Attention to latents: rows that are key and value at once, the same for all query heads."""
