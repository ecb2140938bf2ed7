"""Tensor operations: one op a file, each a torch reference and a launcher that asserts shapes."""
