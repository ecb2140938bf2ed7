"""What a match, a publish and a block of the block index cost, by its size."""
