"""The Triton kernels beside the limits of a GPU."""
