"""Where blocks rest that fell out of the workers' pools: host memory and disk, each with a byte budget."""
