"""What the tokens that sequences have had do to their next ones, kept on the device from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.plan import SampleSpec
from shared.engine.runner.device_link import DeviceLink
from shared.kernels.sampling.history import TokenHistory

_NONE = -1
"""No token: stands in a rule before the tokens that it asks for, where every token fits."""


class SequenceHistories:
    """A slot for each sequence with penalties that the last plan sampled for, by its id; other slots are free.

    A plan gives the tokens of a sequence whose slot is free, those of the others are here: each chosen token is counted
    on the device, in the order of the steps. So a step can be launched before the host knows what the one before chose.
    """

    def __init__(self, max_num_seqs: int, link: DeviceLink) -> None:
        """Takes no memory before the first sequence with penalties."""
        self._max_num_seqs = max_num_seqs
        self._link = link
        self._slots: dict[str, int] = {}
        self._tokens: TokenHistory | None = None
        self._tails: Tensor | None = None  # [max_num_seqs, longest beginning of a rule] int64, the newest token last

    def tokens(self, vocab_size: int) -> TokenHistory:
        """The tokens of all slots, allocated by the first call."""
        if self._tokens is None:
            self._tokens = TokenHistory.empty(self._max_num_seqs, vocab_size, self._link.device)
        return self._tokens

    def place(self, names: Sequence[str], specs: Sequence[SampleSpec], vocab_size: int) -> list[int]:
        """The slots of a plan's sequences with penalties, filled from what the plan gives; all others are free then."""
        before, self._slots = self._slots, {}
        new: list[int] = []
        for at, (name, spec) in enumerate(zip(names, specs, strict=True)):
            slot = before.get(name)
            if slot is None or is_given(spec):
                new.append(at)
            else:
                self._slots[name] = slot
        free = set(range(self._max_num_seqs)).difference(self._slots.values()) if new else set()
        for at in new:
            self._slots[names[at]] = free.pop()
        placed = [specs[at] for at in new]
        if placed:
            self._fill([self._slots[names[at]] for at in new], placed, vocab_size)
        return [self._slots[name] for name in names]

    def _fill(self, slots: list[int], specs: Sequence[SampleSpec], vocab_size: int) -> None:
        counted = [at for at, spec in enumerate(specs) if spec.params.counts_tokens]
        if counted:
            self._fill_tokens([slots[at] for at in counted], [specs[at] for at in counted], vocab_size)
        ruled = [at for at, spec in enumerate(specs) if longest_rule(spec)]
        if ruled:
            tails = self._widened(max(longest_rule(specs[at]) for at in ruled))
            width = tails.shape[1]
            ends = [list(specs[at].output_token_ids[-width:]) for at in ruled]
            padded = torch.tensor([[_NONE] * (width - len(end)) + end for end in ends])
            rows = self._link.send(torch.tensor([slots[at] for at in ruled]))
            tails.index_copy_(0, rows, self._link.send(padded))

    def _fill_tokens(self, slots: list[int], specs: Sequence[SampleSpec], vocab_size: int) -> None:
        history = self.tokens(vocab_size)
        num_words = history.seen.shape[1]
        words = np.zeros((len(slots), num_words), dtype=np.int32)
        places: list[NDArray[np.int64]] = []
        counts: list[NDArray[np.int32]] = []
        for row, (slot, spec) in enumerate(zip(slots, specs, strict=True)):
            output = np.array(spec.output_token_ids, dtype=np.int64)
            bits = np.zeros(32 * num_words, dtype=np.uint8)
            bits[output] = bits[np.array(spec.prompt_token_ids, dtype=np.int64)] = 1
            words[row] = np.packbits(bits, bitorder="little").view(np.int32)
            seen = np.flatnonzero(bits)
            places.append(seen + slot * vocab_size)
            counts.append(np.bincount(output, minlength=len(bits))[seen].astype(np.int32))
        arrays: list[NDArray[Any]] = [
            np.array(slots, dtype=np.int64),
            np.concatenate(places),
            np.concatenate(counts),
            words.reshape(-1),
        ]
        rows, flat, times, sent = self._link.send_all(arrays)
        history.seen.index_copy_(0, rows, sent.view(len(slots), num_words))
        history.counts.view(-1).index_copy_(0, flat, times)

    def _widened(self, longest: int) -> Tensor:
        """The tails, in which rules of that length find their tokens."""
        before, device = self._tails, self._link.device
        if before is None or before.shape[1] < longest:
            self._tails = torch.full((self._max_num_seqs, longest), _NONE, dtype=torch.int64, device=device)
            if before is not None:
                self._tails[:, -before.shape[1] :] = before
        assert self._tails is not None
        return self._tails

    def follow_tails(self, slots: Tensor, tokens: Tensor, counts: Tensor | None = None) -> None:
        """Appends `tokens` [n, most] int64 to the sequences of `slots` [n] int64: of each the first `counts` [n] int64,
        all by default."""
        assert self._tails is not None
        self._tails.index_copy_(0, slots, self._tails_behind(slots, tokens, counts))

    def matches(self, slots: Tensor, beginnings: Tensor, guesses: Tensor | None, counts: Tensor | None) -> Tensor:
        """[num_rules] bool: whether the sequences of `slots` [num_rules] end with `beginnings` [num_rules, length]
        int64, -1 where any token fits. Behind them come the first `counts` [num_rules] of `guesses` [num_rules, most],
        where there are any."""
        assert self._tails is not None
        tails = self._tails.index_select(0, slots) if guesses is None else self._tails_behind(slots, guesses, counts)
        ends = tails[:, -beginnings.shape[1] :]
        return ((ends == beginnings) | (beginnings == _NONE)).all(dim=1)

    def _tails_behind(self, slots: Tensor, tokens: Tensor, counts: Tensor | None) -> Tensor:
        assert self._tails is not None
        longer = torch.cat((self._tails.index_select(0, slots), tokens), dim=1)
        width = self._tails.shape[1]
        if counts is None:
            return longer[:, -width:]
        return longer.gather(1, torch.arange(width, device=tokens.device) + counts[:, None])


def is_given(spec: SampleSpec) -> bool:
    """Whether a plan has a sequence's tokens."""
    return bool(spec.prompt_token_ids or spec.output_token_ids)


def longest_rule(spec: SampleSpec) -> int:
    """Tokens that the longest bad sequence begins with, before its last; 0 where a structure's mask leaves them out."""
    params = spec.params
    if params.structured_output is not None:
        return 0
    return max((len(bad) - 1 for bad in params.bad_sequences), default=0)
