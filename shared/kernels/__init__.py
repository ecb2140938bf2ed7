"""Tensor operations, one folder an op: torch reference, Triton functions (`jit.py`), launcher, benchmark.

`backend.py` holds the contracts, `registry.py` chooses a device's backends. Only `jit.py` files and the
launchers beside them import triton, and nothing imports those where it is missing.
"""
