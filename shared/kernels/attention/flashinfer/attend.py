"""Paged attention through FlashInfer's wrappers."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.attention.contract import check_paged_attention
from shared.kernels.attention.flashinfer.pages import PagedSequences, split_step
from shared.kernels.attention.flashinfer.wrappers import Plan, Shape, Wrappers
from shared.kernels.batch import AttentionBatch

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)


def suits(query: Tensor, kv_blocks: Tensor) -> bool:
    """Whether FlashInfer has code for the shapes; Triton's attention has for all."""
    return query.dtype in DTYPES and kv_blocks.dtype == query.dtype and kv_blocks.shape[5] in HEAD_DIMS


def paged_attention(
    wrappers: Wrappers,
    query: Tensor,
    kv_blocks: Tensor,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """`DecoderOps.paged_attention`, for what `suits`. A step's first layer plans it, the others find the plan."""
    check_paged_attention(query, kv_blocks, layer, batch, window)
    assert query.is_contiguous()
    step = batch.remember("flashinfer pages", lambda: split_step(batch))
    kv_pages = kv_blocks[:, layer]  # [num_blocks, 2, num_kv_heads, block_size, head_dim], a view: FlashInfer's HND
    output: Tensor | None = None
    for is_decode, seqs in ((True, step.decodes), (False, step.chunks)):
        if seqs is None:
            continue
        plan = _plan(wrappers, query, kv_blocks, batch, seqs, is_decode, scale, window)
        if seqs.token_rows is None:
            return plan.run(query, kv_pages).flatten(1)
        if output is None:
            output = torch.empty_like(query)
        output.index_copy_(0, seqs.token_rows, plan.run(query.index_select(0, seqs.token_rows), kv_pages))
    return (query.new_empty(query.shape) if output is None else output).flatten(1)


def _plan(
    wrappers: Wrappers,
    query: Tensor,
    kv_blocks: Tensor,
    batch: AttentionBatch,
    seqs: PagedSequences,
    is_decode: bool,
    scale: float,
    window: int | None,
) -> Plan:
    _, num_heads, head_dim = query.shape
    num_kv_heads = kv_blocks.shape[3]
    shape = Shape(
        is_decode, num_heads, num_kv_heads, head_dim, batch.block_size, window, scale, query.dtype, query.device
    )
    return batch.remember(("flashinfer", shape), lambda: wrappers.plan(shape, seqs))
