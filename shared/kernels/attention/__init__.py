"""Causal grouped-query attention over paged KV: one torch reference, two Triton kernels.

`decode/` serves the sequences with one query token, bound by memory; `prefill/` those with more, bound by compute.
`paged.py` sends each sequence of a step to its kernel.
"""
