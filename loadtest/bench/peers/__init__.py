"""`make bench-peers`: Tandem's engine and its peers on the same checkpoint, in turns."""
