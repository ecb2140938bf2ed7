"""The fleet's cache seen as one, for its operator: statistics, flush, pins, and what of it fails."""
