"""`make bench-peers`: our engine and its peers on the same checkpoint, in turns."""
