"""Paged attention in Triton by one kernel of one size for prompts and answers alike.

A query's result then depends on its own sequence alone, to the bit: keys are taken in the same tiles by absolute
position, by the same code, whether the query is one token or part of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.attention.prefill.configs import prefill_config
from shared.kernels.attention.prefill.launch import prefill_attention
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView


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
    """`DecoderOps.paged_attention`, on the device, without waiting for it."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # The sizes of short chunks, for any: they must not follow the batch.
    config = prefill_config(query.shape[2], query.element_size(), 1, devices.device_limits(query.device))
    prefill_attention(
        query, pool, layer, batch, output, scale=scale, window=window, softcap=softcap, sinks=sinks,
        is_chunked=is_chunked, config=config, uniform=True,
    )  # fmt: skip
    return output.flatten(1)
