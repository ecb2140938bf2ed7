"""Rotary positions and the write into the KV pool, with the norm of each head before them."""
