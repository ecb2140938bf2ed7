"""Launcher of Triton's mask."""

from __future__ import annotations

from torch import Tensor

from shared.kernels.sampling import reference
from shared.kernels.sampling.mask_jit import mask_rows
from shared.kernels.sampling.reference import check_mask_tokens

TILE = 4096
"""Tokens of one program."""


def mask_tokens(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """`SamplingOps.mask_tokens`. Reads the masks and writes what they forbid; the logits are not read."""
    check_mask_tokens(logits, masks, rows)
    vocab_size = logits.shape[1]
    if masks.shape[0] == 0:
        return
    grid = (-(-vocab_size // TILE), masks.shape[0])
    mask_rows[grid](logits, masks, rows, vocab_size, masks.shape[1], TILE=TILE, num_warps=8)


def greedy_tokens(logits: Tensor, masks: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
    """`SamplingOps.greedy_tokens`, torch's reductions around this mask."""
    return reference.greedy_tokens(logits, masks, rows, mask_tokens)
