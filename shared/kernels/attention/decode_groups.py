"""Which single-token sequences of a step attend together, and what they see: the same for all its layers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Sequences with one query token each, of similar KV length, padded to the longest."""

    token_rows: Tensor  # [num_seqs] int64, rows of the step's tokens
    block_ids: Tensor  # [num_seqs, width] int64, a sequence's last block repeated as padding
    visible: Tensor  # [num_seqs, width * block_size] bool, slots that the query sees
    used_lens: tuple[int, ...]  # num_seqs, slots from the first gathered one on that have been written


def visible_blocks(first_query: int, kv_len: int, block_size: int, window: int | None) -> tuple[int, int]:
    """Range of table columns that the queries at positions `first_query .. kv_len - 1` can see."""
    first_key = 0 if window is None else max(0, first_query - window + 1)
    return first_key // block_size, -(-kv_len // block_size)


def decode_groups(batch: AttentionBatch, window: int | None) -> list[DecodeGroup]:
    """The sequences whose query is one token, in groups in which padding at most doubles the keys read.

    Built once a batch for each `window`, a sliding one in tokens or None.
    """
    return batch.remember(("groups", window), lambda: _build(batch, window))


def _build(batch: AttentionBatch, window: int | None) -> list[DecodeGroup]:
    kv_lens, block_tables, block_size = batch.kv_lens, batch.block_tables, batch.block_size
    members: dict[int, list[int]] = defaultdict(list)
    starts: list[int] = []
    start = 0
    for index, (query_len, kv_len) in enumerate(zip(batch.query_lens, kv_lens, strict=True)):
        starts.append(start)
        start += query_len
        if query_len == 1:
            first, last = visible_blocks(kv_len - 1, kv_len, block_size, window)
            members[(last - first - 1).bit_length()].append(index)

    def build(indices: list[int]) -> DecodeGroup:
        device = block_tables.device
        lens = [kv_lens[index] for index in indices]
        ranges = [visible_blocks(kv_len - 1, kv_len, block_size, window) for kv_len in lens]
        width = max(last - first for first, last in ranges)
        columns = [[min(first + step, last - 1) for step in range(width)] for first, last in ranges]
        rows = torch.tensor(indices, device=device)[:, None]
        used_lens = [kv_len - first * block_size for kv_len, (first, _) in zip(lens, ranges, strict=True)]
        ends = torch.tensor(used_lens, device=device)[:, None]
        slots = torch.arange(width * block_size, device=device)
        visible = slots < ends
        if window is not None:
            visible &= slots >= ends - window
        return DecodeGroup(
            token_rows=torch.tensor([starts[index] for index in indices], device=device),
            block_ids=block_tables[rows, torch.tensor(columns, device=device)].long(),
            visible=visible,
            used_lens=tuple(used_lens),
        )

    return [build(indices) for indices in members.values()]
