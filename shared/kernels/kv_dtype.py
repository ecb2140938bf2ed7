"""The dtypes that K and V may be kept in beside the dtype that a model computes in: the same rule for every backend."""

from __future__ import annotations

import torch

KV_DTYPES = {
    torch.float32: (torch.float32, torch.bfloat16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}
"""Compute dtype → KV dtypes. K and V are rounded once, when they are written, and widened when they are read."""


def assert_kv_dtype(compute: torch.dtype, kv: torch.dtype) -> None:
    """For kernels, whose callers have checked it before."""
    assert kv in KV_DTYPES[compute], f"KV in {kv} beside {compute}"
