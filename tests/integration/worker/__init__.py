"""A worker's traffic in blocks, without an engine that computes."""
