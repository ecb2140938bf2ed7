"""Blocks of 16-bit floats in fewer bytes, losslessly."""
