"""Random queries over a random pool, for the two attention benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a model's attention."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, blocks of {self.block_size}"


def attention_inputs(
    plan: Sequence[tuple[int, int]], shape: HeadShape, device: torch.device
) -> tuple[Tensor, Tensor, AttentionBatch]:
    """(query, kv_blocks of one layer, batch) for sequences of (query_len, kv_len), their blocks shuffled."""
    widths = [-(-kv_len // shape.block_size) for _, kv_len in plan]
    order = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(0))
    tables = [part.tolist() for part in torch.split(order, widths)]
    query_lens, kv_lens = [q for q, _ in plan], [kv for _, kv in plan]
    batch = AttentionBatch.from_lists(query_lens, kv_lens, tables, shape.block_size, device)
    pool_shape = (sum(widths), 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    kv_blocks = torch.randn(pool_shape, dtype=shape.dtype, device=device)
    query = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)
    return query, kv_blocks, batch
