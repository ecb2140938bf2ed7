"""A worker's connector in blocks, without an engine that computes."""
