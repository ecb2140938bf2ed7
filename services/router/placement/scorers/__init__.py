"""One file a scorer: how well a worker suits a request, in [0, 1]."""
