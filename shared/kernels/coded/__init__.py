"""Products with weights in codes of 8 or 4 bits, which stay codes in a GPU's memory."""
