"""What a worker reports of itself: load, metrics, traces."""
