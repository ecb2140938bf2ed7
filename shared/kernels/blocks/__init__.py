"""Whole blocks: gathered from a pool, scattered into it, checked."""
