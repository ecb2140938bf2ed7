"""A step's sequences in FlashInfer's form: block tables become compressed sparse rows of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch


@dataclass(frozen=True, eq=False)
class PagedSequences:
    """Some sequences of a step; a page is a block. What lies on the host is read there, by the plan that it makes."""

    query_start: Tensor  # [num_seqs + 1] int32, on the host, cumulative query lengths
    page_start: Tensor  # [num_seqs + 1] int32, on the host: sequence i has the pages page_start[i] … page_start[i + 1]
    pages: Tensor  # [page_start[-1]] int32, on the batch's device
    last_page_lens: Tensor  # [num_seqs] int32, on the host, 1 … block_size tokens
    token_rows: Tensor | None  # [query_start[-1]] int64, on the batch's device: rows of the step's tokens; None = all


@dataclass(frozen=True, eq=False)
class SplitStep:
    """A step's single tokens and its chunks apart; None where it has none of a kind."""

    decodes: PagedSequences | None
    chunks: PagedSequences | None


def split_step(batch: AttentionBatch) -> SplitStep:
    """The lengths come from the host's copies and the pages from `batch.block_tables`; waits for nothing."""
    single = [seq for seq, query_len in enumerate(batch.query_lens) if query_len == 1]
    longer = [seq for seq, query_len in enumerate(batch.query_lens) if query_len > 1]
    return SplitStep(_paged(batch, single) if single else None, _paged(batch, longer) if longer else None)


def _paged(batch: AttentionBatch, seqs: Sequence[int]) -> PagedSequences:
    """The sequences `seqs` of the batch, at least one."""
    rows = np.asarray(seqs)
    query_lens = np.asarray(batch.query_lens)
    kv_lens = np.asarray(batch.kv_lens)[rows]
    num_pages = -(-kv_lens // batch.block_size)
    own_lens = query_lens[rows]
    token_rows = None
    if len(seqs) < batch.num_seqs:
        starts = np.cumsum(query_lens) - query_lens
        token_rows = _send(_ranges(starts[rows], own_lens), batch)
    table_rows = _send(np.repeat(rows, num_pages), batch)
    columns = _send(_ranges(np.zeros_like(rows), num_pages), batch)
    return PagedSequences(
        query_start=_starts(own_lens),
        page_start=_starts(num_pages),
        pages=batch.block_tables[table_rows, columns],
        last_page_lens=torch.from_numpy((kv_lens - (num_pages - 1) * batch.block_size).astype(np.int32)),
        token_rows=token_rows,
    )


def _starts(lens: np.ndarray) -> Tensor:
    """[len(lens) + 1] int32: 0 and the cumulative sums."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32))


def _ranges(begins: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """[sum(lens)] int64: begins[0] … begins[0] + lens[0] - 1, then likewise the others'."""
    ends = np.cumsum(lens)
    moved: np.ndarray = np.arange(ends[-1]) + np.repeat(begins - (ends - lens), lens)
    return moved


def _send(values: np.ndarray, batch: AttentionBatch) -> Tensor:
    """[n] int64 on the batch's device; through pinned memory, so that the host does not wait for the step before."""
    host = torch.from_numpy(values.astype(np.int64))
    device = batch.block_tables.device
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
