"""Tiers for blocks beyond the workers' pools: host memory and disk, each with a byte budget."""
