"""Random queries over a random pool, for the two attention benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView


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


NUM_LAYERS = 32
LAYER = NUM_LAYERS // 2
"""The one that attention reads: from one block's keys to the next are all the other layers, as in an engine's pool."""
_POOL_BYTES = 64 << 30
_SPARE_BYTES = 4 << 30


def pool_memory(device: torch.device) -> Tensor | None:
    """[num_bytes] uint8, the memory of every case's pool in turn: on a GPU as much as an engine has, where a small one
    would fit into what the device can translate at once. None where a case makes one as large as it needs."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    memory = torch.empty(max(0, min(_POOL_BYTES, free - _SPARE_BYTES)), dtype=torch.uint8, device=device)
    memory.view(torch.bfloat16).normal_()
    return memory


def attention_inputs(
    plan: Sequence[tuple[int, int]], shape: HeadShape, device: torch.device, memory: Tensor | None = None
) -> tuple[Tensor, PoolView, AttentionBatch]:
    """(query, pool of all layers, batch) for sequences of (query_len, kv_len), their blocks shuffled over the pool
    in `memory`, see `pool_memory`."""
    widths = [-(-kv_len // shape.block_size) for _, kv_len in plan]
    block_shape = (NUM_LAYERS, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    block_bytes = prod(block_shape) * shape.dtype.itemsize
    if memory is None or memory.numel() < sum(widths) * block_bytes:
        rows = torch.randn((sum(widths), *block_shape), dtype=shape.dtype, device=device)
    else:
        num_bytes = memory.numel() // block_bytes * block_bytes
        rows = memory[:num_bytes].view(shape.dtype).view(-1, *block_shape)
    order = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(0))
    tables = [part.tolist() for part in torch.split(order[: sum(widths)], widths)]
    query_lens, kv_lens = [q for q, _ in plan], [kv for _, kv in plan]
    batch = AttentionBatch.from_lists(query_lens, kv_lens, tables, shape.block_size, device)
    query = torch.randn(sum(query_lens), shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)
    return query, PoolView.over(rows), batch
