"""Prefill attention with the means of Hopper (compute capability 9.0)."""
