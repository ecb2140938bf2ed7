"""The block index by its size."""
