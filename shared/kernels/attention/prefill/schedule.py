"""A step's schedule of prefill attention: made once, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.attention.prefill.schedule_jit import WIDTH, plan_prefill_items
from shared.kernels.batch import AttentionBatch

SEQS = 256  # sequences that the schedule reads at once, whatever the batch size
ITEMS = 64  # work items that it writes at once


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """The query tiles of all chunks of a step."""

    items: Tensor  # [num_tiles, 8] int32, see schedule_jit

    @property
    def num_tiles(self) -> int:
        """Query tiles of the step for each KV head; 0 where no query has several tokens."""
        return self.items.shape[0]


ANY = 2**31 - 1
"""More tokens than any query has."""


def longest_chunk(batch: AttentionBatch, most: int = ANY) -> int:
    """Tokens of the longest query that has several and at most `most`; 0 where none has."""
    return batch.remember(
        ("longest chunk", most), lambda: max((n for n in batch.query_lens if 1 < n <= most), default=0)
    )


def plan_prefill(batch: AttentionBatch, tile_tokens: int, least: int = 2, most: int = ANY) -> PrefillPlan:
    """Lay out tiles of `tile_tokens` query tokens, on the device, for the queries of `least` to `most` tokens."""
    num_tiles = sum(-(-query_len // tile_tokens) for query_len in batch.query_lens if least <= query_len <= most)
    items = torch.empty((num_tiles, WIDTH.value), dtype=torch.int32, device=batch.seq_lens.device)
    if num_tiles:
        plan_prefill_items[(batch.num_seqs,)](
            batch.query_start,
            batch.seq_lens,
            items,
            num_tiles,
            tile_tokens,
            least,
            most,
            SEQS=SEQS,
            ITEMS=ITEMS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return PrefillPlan(items)
