"""Launcher of the Hopper prefill attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.experimental.gluon.nvidia.hopper import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
    TensorDescriptor,
)

from shared.kernels.attention.contract import check_paged_attention
from shared.kernels.attention.hopper.jit import prefill_tiles_hopper
from shared.kernels.attention.prefill.schedule import longest_chunk, plan_prefill
from shared.kernels.batch import AttentionBatch

ROWS = 128  # query heads times tokens of one tile, for both consumers
TILE = 64  # keys of one step; with 128 the loop's six invariant scalars spill
STAGES = 4  # tiles of K and of V in shared memory
MAX_REGISTERS = 168  # a thread, on average: consumers take 240, the producer 24


def suits(query: Tensor, kv_blocks: Tensor) -> bool:
    """Whether this kernel has code for the shapes; the portable one has for all."""
    block_size, head_dim = kv_blocks.shape[4:]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and kv_blocks.dtype == query.dtype
        and head_dim in (64, 128)
        and TILE % block_size == 0
        and block_size % 8 == 0
        and query.shape[1] // kv_blocks.shape[3] <= ROWS
        and kv_blocks.numel() // head_dim < 2**31
    )


def prefill_attention(
    query: Tensor,
    kv_blocks: Tensor,
    layer: int,
    batch: AttentionBatch,
    output: Tensor,
    *,
    scale: float,
    window: int | None,
) -> None:
    """As the portable `prefill_attention`, for what `suits`: 16 bits, heads of 64 or 128 dims, K and V like the query.

    Compiled, never run on hardware yet.
    """
    check_paged_attention(query, kv_blocks, layer, batch, window)
    assert suits(query, kv_blocks)
    assert query.is_contiguous()
    assert output.is_contiguous()
    assert output.shape == query.shape
    assert output.dtype == query.dtype
    assert batch.block_tables.stride(1) == 1
    if not longest_chunk(batch):
        return
    num_layers, _, num_kv_heads, block_size, head_dim = kv_blocks.shape[1:]
    group = query.shape[1] // num_kv_heads
    tile_tokens = ROWS // group
    plan = batch.remember(("prefill", tile_tokens), lambda: plan_prefill(batch, tile_tokens))
    box = [block_size, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for([TILE, head_dim], gl.bfloat16)
    rows = kv_blocks.view(-1, head_dim)
    prefill_tiles_hopper[(num_kv_heads, plan.num_tiles)](
        query,
        TensorDescriptor(rows, list(rows.shape), list(rows.stride()), box, layout),
        batch.block_tables,
        plan.items,
        output,
        layer,
        num_layers,
        batch.block_tables.stride(0),
        scale * math.log2(math.e),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        TILE=TILE,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )
