"""A step's schedule of decode attention: made once, used by every layer with the same window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels import device as devices
from shared.kernels.attention.decode.schedule_jit import WIDTH, plan_decode_items
from shared.kernels.attention.decode.splits import DecodeConfig, decode_config, decode_grid
from shared.kernels.batch import AttentionBatch

SEQS = 256  # sequences that the schedule reads at once, whatever the batch size
ITEMS = 64  # work items that it writes at once


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """Work items of a launch and the memory that its parts meet in. Layers use it one after another."""

    config: DecodeConfig
    items: Tensor  # [num_slots, 8] int32, see schedule_jit
    tickets: Tensor  # [num_seqs, num_kv_heads] int32, parts that are done; 0 before and after a launch
    part_means: Tensor  # [num_slots, queries, num_heads, head_dim] fp32, of the sequences with several parts
    part_peaks: Tensor  # [num_slots, queries, num_heads] fp32, base-2 log of the softmax's denominator

    @property
    def num_slots(self) -> int:
        """Parts that there can be for each KV head."""
        return self.items.shape[0]


def plan_decode(
    batch: AttentionBatch,
    heads: tuple[int, int, int],
    window: int | None,
    dtype: torch.dtype,
    config: DecodeConfig | None = None,
    *,
    is_chunked: bool = False,
    queries: int = 1,
) -> DecodePlan:
    """Work out the schedule on the device, from the lengths that it has there.

    Args:
        batch: the step's sequences, at least one.
        heads: (num_heads, num_kv_heads, head_dim).
        window: sliding window in tokens, or None.
        dtype: of the query.
        config: sizes to compile for instead of `decode_config`'s.
        is_chunked: as for `DecoderOps.paged_attention`.
        queries: most tokens of a sequence that is served; a power of 2.
    """
    num_heads, num_kv_heads, head_dim = heads
    device = batch.seq_lens.device
    limits = devices.device_limits(device)
    config = config or decode_config(head_dim, dtype.itemsize, limits, num_heads // num_kv_heads * queries)
    capacity = batch.block_tables.shape[1] * batch.block_size
    if window is not None:
        capacity = min(capacity, window + queries - 1 + config.tile)  # a window may begin anywhere in its first tile
    grid = decode_grid(batch.num_seqs, capacity, num_kv_heads, limits.num_multiprocessors, config)
    items = torch.empty((grid.num_slots, WIDTH.value), dtype=torch.int32, device=device)
    plan_decode_items[(batch.num_seqs,)](
        batch.query_start,
        batch.seq_lens,
        items,
        batch.num_seqs,
        grid.num_items,
        grid.num_uneven_items,
        grid.num_slots,
        TILE=config.tile,
        MIN_TILES=config.min_tiles,
        WINDOW=window or 0,
        CHUNKED=is_chunked,
        QUERIES=queries,
        SEQS=SEQS,
        ITEMS=ITEMS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    num_means = grid.num_slots if grid.has_merge else 0
    return DecodePlan(
        config,
        items,
        tickets=torch.zeros((batch.num_seqs, num_kv_heads), dtype=torch.int32, device=device),
        part_means=torch.empty((num_means, queries, num_heads, head_dim), dtype=torch.float32, device=device),
        part_peaks=torch.empty((num_means, queries, num_heads), dtype=torch.float32, device=device),
    )
