"""Cost of the block index by its size."""
