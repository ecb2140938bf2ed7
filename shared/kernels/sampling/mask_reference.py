"""Masks, and the likeliest token under them, in plain torch: the definition that the kernels are held to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MaskTokens = Callable[[Tensor, Tensor, Tensor], None]


def check_mask_tokens(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Assert what `SamplingOps.mask_tokens` asks of its arguments."""
    assert logits.dim() == masks.dim() == 2
    assert rows.shape == (masks.shape[0],), f"{tuple(rows.shape)} rows for {masks.shape[0]} masks"
    assert masks.shape[1] * 32 >= logits.shape[1], f"{masks.shape[1]} words for {logits.shape[1]} tokens"
    assert logits.dtype == torch.float32
    assert masks.dtype == torch.int32
    assert rows.dtype == torch.int64
    assert logits.is_contiguous()
    assert masks.is_contiguous()
    assert logits.device == masks.device == rows.device


def check_greedy_tokens(logits: Tensor, masks: Tensor | None, rows: Tensor | None) -> None:
    """Assert what `SamplingOps.greedy_tokens` asks of its arguments."""
    assert (masks is None) == (rows is None), "masks and their rows go together"
    if masks is not None and rows is not None:
        check_mask_tokens(logits, masks, rows)
        return
    assert logits.dim() == 2
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()


def mask_tokens(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """`SamplingOps.mask_tokens`."""
    check_mask_tokens(logits, masks, rows)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    kept = logits.index_select(0, rows).masked_fill_(~allowed, float("-inf"))
    logits.index_copy_(0, rows, kept)


def greedy_tokens(
    logits: Tensor, masks: Tensor | None = None, rows: Tensor | None = None, mask: MaskTokens = mask_tokens
) -> Tensor:
    """`SamplingOps.greedy_tokens`; `mask` is the backend's."""
    check_greedy_tokens(logits, masks, rows)
    tokens = _highest(logits)
    if masks is not None and rows is not None:
        part = logits.index_select(0, rows)
        mask(part, masks, torch.arange(rows.shape[0], device=rows.device))
        # A NaN is a fault also where it was a token that is not allowed.
        chosen = torch.where(tokens.index_select(0, rows) < 0, -1, _highest(part))
        tokens.index_copy_(0, rows, chosen)
    return tokens


def _highest(logits: Tensor) -> Tensor:
    """[num_rows] int64; -1 for a row with a NaN, +inf or nothing finite: argmax takes a NaN or +inf for the highest, so
    one look at what it found is enough."""
    tokens = logits.argmax(dim=-1)
    return torch.where(logits.gather(1, tokens[:, None])[:, 0].isfinite(), tokens, -1)
