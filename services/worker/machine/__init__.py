"""What a worker makes of its machine: cores, kernels, the size of its pool, a test before it serves."""
