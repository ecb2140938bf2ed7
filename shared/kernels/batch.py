"""The tensors that tell attention which token of a step belongs where."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")
FEW_TOKENS = 48
"""Number of tokens up to which lists are faster than numpy's calls."""


def step_positions(query_lens: Sequence[int], kv_lens: Sequence[int]) -> NDArray[np.int64]:
    """[num_tokens], each token's place in its sequence."""
    if sum(query_lens) <= FEW_TOKENS:
        pairs = zip(query_lens, kv_lens, strict=True)
        return np.array([at for count, end in pairs for at in range(end - count, end)], dtype=np.int64)
    # A token's position is its row in the step, moved by its sequence's start.
    ends = np.cumsum(query_lens)
    positions: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(np.asarray(kv_lens) - ends, query_lens)
    return positions


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One ragged step over paged KV: sequence i computes its last `query_lens[i]` of `kv_lens[i]` tokens.

    Tokens of all sequences lie one after another in the step's `[num_tokens, ...]` tensors, in the order of
    the sequences here. The two tuples repeat `query_start` and `seq_lens` on the host, so that planning on
    the CPU never waits for the device.

    Invariant, asserted: `1 <= query_lens[i] <= kv_lens[i] <= max_blocks * block_size`.
    """

    query_start: Tensor  # [num_seqs + 1] int32, cumulative query lengths, begins with 0
    seq_lens: Tensor  # [num_seqs] int32, KV length including this step's tokens
    block_tables: Tensor  # [num_seqs, max_blocks] int32, entries past a sequence's last block are not read
    slots: Tensor  # [num_tokens] int64, block_id * block_size + offset where this step's K and V go
    query_lens: tuple[int, ...]  # num_seqs lengths
    kv_lens: tuple[int, ...]  # num_seqs lengths
    block_size: int  # tokens
    groups: tuple[AttentionBatch, ...] = ()  # over blocks of KV groups: each group's, of which this is the first
    state_blocks: Tensor | None = (
        None  # [num_seqs, 3, num_states] int32: of each group of states the blocks of `KVGroups.state_places`
    )
    token_states: Tensor | None = None
    """[num_tokens, 3, num_states] int32, in place of `state_blocks` in a step with guesses: those of each token by
    itself, which reads what the one before it wrote."""
    has_guesses: bool = False
    """Whether the step checks guesses: then it computes a few tokens of each sequence, and nothing of prompts."""
    _remembered: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        num_seqs = len(self.query_lens)
        assert len(self.kv_lens) == num_seqs
        assert self.query_start.shape == (num_seqs + 1,)
        assert self.seq_lens.shape == (num_seqs,)
        assert self.block_tables.dim() == 2
        assert self.block_tables.shape[0] == num_seqs
        assert self.slots.shape == (sum(self.query_lens),)
        assert self.query_start.dtype == self.seq_lens.dtype == self.block_tables.dtype == torch.int32
        assert self.slots.dtype == torch.int64
        capacity = self.block_tables.shape[1] * self.block_size
        for query_len, kv_len in zip(self.query_lens, self.kv_lens, strict=True):
            assert 1 <= query_len <= kv_len <= capacity

    @property
    def num_seqs(self) -> int:
        """Sequences in the step."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, over all sequences."""
        return self.slots.shape[0]

    @property
    def group_slots(self) -> Tensor:
        """`slots`, or of KV groups [num_groups, num_tokens], contiguous."""
        return torch.stack([batch.slots for batch in self.groups]) if self.groups else self.slots

    def remember(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value of `build()`, called once for a key: a backend's plan of the step, the same for its layers.

        The batch's tensors must not change between the layers of a step.
        """
        if key not in self._remembered:
            self._remembered[key] = build()
        return cast(T, self._remembered[key])

    def with_groups(self, later: Sequence[AttentionBatch]) -> AttentionBatch:
        """The same step over blocks of KV groups: this is the first group's, `later` are those of the others."""
        return replace(self, groups=(self, *later))

    @classmethod
    def from_lists(
        cls,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: Sequence[Sequence[int] | NDArray[np.int32]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Build the tensors from host lists; `block_tables[i]` covers at least `kv_lens[i]` tokens.

        Shorter tables are padded with block 0, which attention never reads for that sequence.
        """
        width = max((len(table) for table in block_tables), default=0)
        tables = np.zeros((len(block_tables), width), dtype=np.int32)
        for row, table in zip(tables, block_tables, strict=True):
            row[: len(table)] = table
        query_start = np.array([0, *accumulate(query_lens)], dtype=np.int32)
        seq_lens = np.array(kv_lens, dtype=np.int32)
        positions = step_positions(query_lens, kv_lens)
        if len(positions) <= FEW_TOKENS:
            rows = [row for row, count in enumerate(query_lens) for _ in range(count)]
            pairs = zip(rows, positions.tolist(), strict=True)
            places = [block_tables[row][at // block_size] * block_size + at % block_size for row, at in pairs]
            slots = np.array(places, dtype=np.int64)
        else:
            blocks, offsets = np.divmod(positions, block_size)
            slots = tables[np.repeat(np.arange(len(tables)), query_lens), blocks].astype(np.int64)
            slots = slots * block_size + offsets
        return cls(
            query_start=torch.from_numpy(query_start).to(device),
            seq_lens=torch.from_numpy(seq_lens).to(device),
            block_tables=torch.from_numpy(tables).to(device),
            slots=torch.from_numpy(slots).to(device),
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            block_size=block_size,
        )
