"""Which tokens sequences have had, on the device: what penalties follow from. With the reference in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenHistory:
    """A slot for each sequence."""

    seen: Tensor  # [num_slots, num_words] int32; bit i % 32 of word i // 32: prompt or output has token i
    counts: Tensor  # [num_slots, vocab_size] int32, how often the output has it; means nothing where it was not seen

    @classmethod
    def empty(cls, num_slots: int, vocab_size: int, device: torch.device | str) -> TokenHistory:
        """Slots in which nothing was seen."""
        seen = torch.zeros((num_slots, -(-vocab_size // 32)), dtype=torch.int32, device=device)
        return cls(seen, torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device))


@dataclass(frozen=True, eq=False)
class Penalties:
    """One entry a row of logits. Off: repetition 1, presence 0, frequency 0."""

    slots: Tensor  # [num_rows] int64, in a TokenHistory; -1: the row has none
    repetition: Tensor  # [num_rows] fp32
    presence: Tensor  # [num_rows] fp32
    frequency: Tensor  # [num_rows] fp32


def check_penalize(logits: Tensor, history: TokenHistory, penalties: Penalties) -> None:
    """Assert what `SamplingOps.penalize` asks of its arguments."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert penalties.slots.shape == (num_rows,)
    assert penalties.slots.dtype == torch.int64
    for factors in (penalties.repetition, penalties.presence, penalties.frequency):
        assert factors.shape == (num_rows,)
        assert factors.dtype == torch.float32
    _check_history(history, vocab_size)
    assert logits.device == penalties.slots.device == history.seen.device


def check_count_tokens(history: TokenHistory, slots: Tensor, tokens: Tensor) -> None:
    """Assert what `SamplingOps.count_tokens` asks of its arguments."""
    assert slots.dim() == 1
    assert slots.shape == tokens.shape
    assert slots.dtype == tokens.dtype == torch.int64
    _check_history(history, history.counts.shape[1])
    assert slots.device == tokens.device == history.seen.device


def _check_history(history: TokenHistory, vocab_size: int) -> None:
    num_slots = history.seen.shape[0]
    assert history.counts.shape == (num_slots, vocab_size)
    assert history.seen.shape == (num_slots, -(-vocab_size // 32))
    assert history.seen.dtype == history.counts.dtype == torch.int32
    assert history.seen.is_contiguous()
    assert history.counts.is_contiguous()


def penalize(logits: Tensor, history: TokenHistory, penalties: Penalties) -> None:
    """`SamplingOps.penalize`."""
    check_penalize(logits, history, penalties)
    has_slot, slots = penalties.slots[:, None] >= 0, penalties.slots.clamp(min=0)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    words = history.seen.index_select(0, slots)
    seen = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]] & has_slot
    counts = torch.where(seen, history.counts.index_select(0, slots), 0)
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    lowered = penalties.presence[:, None] + penalties.frequency[:, None] * counts
    changed = torch.where(counts > 0, repeated - lowered, repeated)
    logits.copy_(torch.where(seen, changed, logits))


def count_tokens(history: TokenHistory, slots: Tensor, tokens: Tensor) -> None:
    """`SamplingOps.count_tokens`."""
    check_count_tokens(history, slots, tokens)
    vocab_size, num_words = history.counts.shape[1], history.seen.shape[1]
    counted = (slots >= 0) & (tokens >= 0)
    slots, tokens = slots.clamp(min=0), tokens.clamp(min=0)
    word = slots * num_words + tokens // 32
    bit = torch.ones_like(tokens) << tokens % 32  # of 64 bits: the 32nd is no sign
    before = history.seen.view(-1).index_select(0, word).long()
    is_new = (before & bit) == 0
    # What is not counted adds nothing, wherever it points: there may be another there that is.
    history.seen.view(-1).index_add_(0, word, torch.where(counted & is_new, bit, 0).to(torch.int32))
    place = slots * vocab_size + tokens
    stale = history.counts.view(-1).index_select(0, place)
    change = torch.where(counted, torch.where(is_new, 1 - stale, 1), 0).to(torch.int32)
    history.counts.view(-1).index_add_(0, place, change)
