"""A worker's blocks beyond its own requests: offered to stores, given to peers, fetched from both."""
