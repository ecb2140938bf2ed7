"""One file a scorer: a worker's worth for a request, in [0, 1]."""
