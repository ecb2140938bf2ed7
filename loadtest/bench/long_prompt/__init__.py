"""What a long prompt's arrival does to answers that are being written: inter-token latency with and without."""
