"""A pool as the C++ kernels take it."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p

import torch

from shared.kernels.pool_view import PoolView

_DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
"""Dtypes of KV in the order of source/ops.h."""


class CPool(Structure):
    """See `PoolView` in source/ops.h. It does not keep the pool's memory."""

    _fields_ = [
        ("memory", c_void_p),
        *(
            (name, c_int64)
            for name in (
                "dtype", "block_bytes", "layer_bytes", "plane_bytes", "head_bytes", "kv_heads", "block_size", "dim",
            )
        ),
    ]  # fmt: skip

    @classmethod
    def of(cls, pool: PoolView) -> CPool:
        """Asserts that the kernels read its dtype."""
        assert pool.dtype in _DTYPES, f"KV in {pool.dtype}"
        of_block, of_layer, of_plane, of_head, _ = pool.memory.stride()
        return cls(
            pool.memory.data_ptr(),
            _DTYPES.index(pool.dtype),
            of_block,
            of_layer,
            of_plane if pool.num_planes == 2 else 0,
            of_head,
            pool.num_kv_heads,
            pool.block_size,
            pool.head_dim,
        )
