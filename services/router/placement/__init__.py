"""Which workers take a request: filter → score in [0, 1] → pick. Pure policy over plain numbers."""
