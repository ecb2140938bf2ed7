"""Tiers for blocks that were evicted from the workers' pools: host memory and disk, each with a byte budget."""
