"""The client side of the index of which worker or store holds which block."""
