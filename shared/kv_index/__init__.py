"""The client side of the index of who holds which block."""
