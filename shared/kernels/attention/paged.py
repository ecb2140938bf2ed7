"""Paged attention in Triton: each sequence of a step by the kernel that suits its query."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.attention import reference
from shared.kernels.attention.decode.launch import decode_attention
from shared.kernels.attention.decode.splits import most_rows
from shared.kernels.attention.latent.launch import latent_attention, suits
from shared.kernels.attention.prefill import cudnn, cuts
from shared.kernels.attention.prefill.launch import prefill_attention
from shared.kernels.attention.prefill.schedule import ANY, longest_chunk
from shared.kernels.batch import AttentionBatch
from shared.kernels.device import next_power_of_2
from shared.kernels.pool_view import PoolView


def shared_reads(batch: AttentionBatch, query: Tensor, pool: PoolView) -> int:
    """Tokens of each sequence that share one read of its keys and values: in a step that checks guesses all, to a power
    of 2, as far as there is room for so many rows; else 1, and what has several is a chunk."""
    if not batch.has_guesses:
        return 1
    queries = next_power_of_2(max(batch.query_lens))
    _, num_heads, head_dim = query.shape
    return queries if queries * (num_heads // pool.num_kv_heads) <= most_rows(head_dim, query.element_size()) else 1


def paged_attention(
    query: Tensor,
    pool: PoolView,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    is_chunked: bool = False,
) -> Tensor:
    """`DecoderOps.paged_attention`, on the device, without waiting for it. Latents of no real model's size are left to
    torch."""
    if pool.num_planes == 1:
        if window is not None or not suits(query, pool):
            return reference.paged_attention(query, pool, layer, batch, scale=scale, window=window)
        return latent_attention(query, pool, layer, batch, scale=scale)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    shared = batch.remember(("shared reads", query.shape[1:]), lambda: shared_reads(batch, query, pool))
    if shared > 1 or batch.remember("has decodes", lambda: 1 in batch.query_lens):
        decode_attention(
            query, pool, layer, batch, output, scale=scale, window=window, softcap=softcap, sinks=sinks,
            is_chunked=is_chunked, queries=shared,
        )  # fmt: skip
    if shared > 1:
        return output.flatten(1)
    long: tuple[int, ...] = ()
    if window is None and softcap is None and sinks is None and cudnn.serves(query, pool):
        num_heads = query.shape[1]
        long = batch.remember(("long chunks", num_heads), lambda: cuts.long_chunks(batch, num_heads))
    for index in long:
        cudnn.long_attention(query, pool, layer, batch, index, output, scale=scale)
    most = cuts.LEAST_TOKENS - 1 if long else ANY
    if longest_chunk(batch, most):
        prefill_attention(
            query, pool, layer, batch, output, scale=scale, window=window, softcap=softcap, sinks=sinks,
            is_chunked=is_chunked, most=most,
        )  # fmt: skip
    return output.flatten(1)
