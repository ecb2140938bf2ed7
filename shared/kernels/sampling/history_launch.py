"""Launchers of Triton's penalties and of its count of tokens."""

from __future__ import annotations

from torch import Tensor

from shared.kernels.sampling.history import Penalties, TokenHistory, check_count_tokens, check_penalize
from shared.kernels.sampling.history_jit import count_chosen, penalize_rows

TILE = 2048
"""Tokens of one program."""


def penalize(logits: Tensor, history: TokenHistory, penalties: Penalties) -> None:
    """`SamplingOps.penalize`. Reads a bit a token, and logits and counts of the tokens that were seen."""
    check_penalize(logits, history, penalties)
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    penalize_rows[(-(-vocab_size // TILE), num_rows)](
        logits,
        history.seen,
        history.counts,
        penalties.slots,
        penalties.repetition,
        penalties.presence,
        penalties.frequency,
        vocab_size,
        history.seen.shape[1],
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )


def count_tokens(history: TokenHistory, slots: Tensor, tokens: Tensor) -> None:
    """`SamplingOps.count_tokens`."""
    check_count_tokens(history, slots, tokens)
    if slots.shape[0] == 0:
        return
    vocab_size, num_words = history.counts.shape[1], history.seen.shape[1]
    count_chosen[(slots.shape[0],)](history.seen, history.counts, slots, tokens, vocab_size, num_words, num_warps=1)
