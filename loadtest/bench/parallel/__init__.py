"""Groups of ranks: their sums beside gloo's, their steps beside one process's."""
