"""Sampling in plain torch, by sorting: the definition that the kernel is held to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.kernels.sampling.rows import SamplingRows

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
MaskTokens = Callable[[Tensor, Tensor, Tensor], None]


def check_sample_tokens(logits: Tensor, rows: SamplingRows) -> None:
    """Assert what `SamplingOps.sample_tokens` asks of its arguments."""
    assert logits.dim() == 2
    assert logits.shape[0] == rows.num_rows
    assert logits.shape[1] >= 1
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert logits.device == rows.temperatures.device


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """[num_rows, vocab_size] fp32: softmax at each row's temperature; greedy rows at temperature 1."""
    divisors = torch.where(rows.temperatures > 0, rows.temperatures, 1.0)
    return torch.softmax(logits / divisors[:, None], dim=-1)


def sample_tokens(logits: Tensor, rows: SamplingRows) -> Tensor:
    """`SamplingOps.sample_tokens`."""
    check_sample_tokens(logits, rows)
    vocab_size = logits.shape[1]
    unsorted = probabilities(logits, rows)
    sorted_probabilities, order = unsorted.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(vocab_size, device=logits.device)
    likely = sorted_probabilities >= rows.min_ps[:, None] * sorted_probabilities[:, :1]
    kept = likely.sum(dim=-1)
    kept = torch.where(rows.top_ks > 0, torch.minimum(kept, rows.top_ks), kept).clamp(min=1)
    cumulative = sorted_probabilities.double().cumsum(dim=-1)
    mass = cumulative.gather(1, kept[:, None] - 1)
    # The token that crosses top_p is still in: keep those with less than top_p before them.
    inside = (cumulative - sorted_probabilities.double() < rows.top_ps[:, None] * mass) & (places < kept[:, None])
    kept = torch.where(rows.top_ps < 1.0, inside.sum(dim=-1).clamp(min=1), kept)
    mass = cumulative.gather(1, kept[:, None] - 1)
    points = uniform(rows.seeds, rows.positions)[:, None] * mass
    drawn = torch.minimum((cumulative <= points).sum(dim=-1), kept - 1)
    tokens = order.gather(1, drawn[:, None])[:, 0]
    peaks = logits.amax(dim=-1)
    likeliest = torch.where(logits == peaks[:, None], places, vocab_size).amin(dim=-1)
    tokens = torch.where(unsorted[:, 0].isnan(), -1, tokens)  # one such probability makes all of them NaN
    tokens = torch.where(rows.temperatures > 0, tokens, likeliest)
    return torch.where(logits.isnan().any(dim=-1) | peaks.isinf(), -1, tokens)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[n] int64 seeds and positions to [n] fp64 in [0, 1): the numbers of `shared.kernels.sampling.philox.uniform`.

    Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011). numpy on the host, where torch would take a hundred times as
    long over so few numbers; torch on a device, where a copy to the host would wait for it and break a graph's capture.
    """
    if seeds.device.type == "cpu":
        keys, counters = (column.numpy().view(np.uint64) for column in (seeds, positions))
        bits = _philox_bits(keys & _MASK, keys >> _HALF, counters & _MASK, counters >> _HALF)
        return torch.from_numpy(bits.astype(np.float64) / float(1 << 53))
    return uniform_on_device(seeds, positions)


def uniform_on_device(seeds: Tensor, positions: Tensor) -> Tensor:
    """`uniform` in torch's operations alone; int64 products wrap, so their bits are those of unsigned ones."""
    mask = (1 << 32) - 1
    key_0, key_1 = seeds & mask, (seeds >> 32) & mask
    c_0, c_1 = positions & mask, (positions >> 32) & mask
    c_2 = c_3 = torch.zeros_like(c_0)
    for _ in range(10):
        first, second = c_0 * 0xD2511F53, c_2 * 0xCD9E8D57
        c_0, c_1, c_2, c_3 = (
            ((second >> 32) & mask) ^ c_1 ^ key_0,
            second & mask,
            ((first >> 32) & mask) ^ c_3 ^ key_1,
            first & mask,
        )
        key_0, key_1 = (key_0 + 0x9E3779B9) & mask, (key_1 + 0xBB67AE85) & mask
    return ((c_0 << 21) | (c_1 >> 11)).double() * 2.0**-53


def _philox_bits(
    key_0: NDArray[np.uint64], key_1: NDArray[np.uint64], c_0: NDArray[np.uint64], c_1: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """[n] 53 random bits for 32-bit halves of n keys and counters."""
    c_2 = c_3 = np.zeros_like(c_0)
    for _ in range(10):
        first, second = c_0 * np.uint64(0xD2511F53), c_2 * np.uint64(0xCD9E8D57)
        c_0, c_1, c_2, c_3 = (
            (second >> _HALF) ^ c_1 ^ key_0,
            second & _MASK,
            (first >> _HALF) ^ c_3 ^ key_1,
            first & _MASK,
        )
        key_0, key_1 = (key_0 + np.uint64(0x9E3779B9)) & _MASK, (key_1 + np.uint64(0xBB67AE85)) & _MASK
    return (c_0 << np.uint64(21)) | (c_1 >> np.uint64(11))


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
