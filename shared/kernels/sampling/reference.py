"""Sampling in plain torch, by sorting: the definition that the kernel is held to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shared.kernels.sampling.rows import SamplingRows

MaskTokens = Callable[[Tensor, Tensor, Tensor], None]

NEAR = 0x25800000
"""Bound below which one of 2^31 equally likely numbers stands for a u near to 1, where -log(u) is taken of 1 - u."""
ROOT_HALF_BITS = 0x3F3504F3
"""Bits of the square root of 1/2 in fp32: mantissas lie between it and twice it."""
LN_2 = 0.6931472
LOG_COEFFICIENTS = (
    -0.076285586, 0.12910533, -0.13243358, 0.14180933, -0.1660893, 0.20002013, -0.2500159, 0.33333325, -0.49999988,
)  # fmt: skip
"""Coefficients of (log(1 + x) - x) / x^2 for mantissas 1 + x, falling powers: least squares with weights made even, so
that log(1 + x) is off by 2e-7 of itself at most, fp32's rounding included."""


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
    times = race_times(rows.seeds, rows.positions, vocab_size)
    speeds = torch.where(places < kept[:, None], sorted_probabilities / times.gather(1, order), -1.0)
    first = speeds == speeds.amax(dim=-1, keepdim=True)
    tokens = torch.where(first, order, vocab_size).amin(dim=-1)
    peaks = logits.amax(dim=-1)
    likeliest = torch.where(logits == peaks[:, None], places, vocab_size).amin(dim=-1)
    tokens = torch.where(unsorted[:, 0].isnan(), -1, tokens)  # one such probability makes all of them NaN
    tokens = torch.where(rows.temperatures > 0, tokens, likeliest)
    return torch.where(logits.isnan().any(dim=-1) | peaks.isinf(), -1, tokens)


def race_times(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """[n] int64 seeds and positions to [n, vocab_size] fp32: each token's `shared.kernels.sampling.philox.time_of`.

    Only products, sums and whole numbers of fp32, in an order that every kernel keeps: the same bits everywhere.
    """
    words = _token_words(seeds, positions, vocab_size) >> 1
    near = words < NEAR
    parts = (torch.where(near, words, (1 << 31) - 1 - words).float() + 0.5) * 2.0**-31
    bits = parts.view(torch.int32) - ROOT_HALF_BITS
    exponents = torch.where(near, 0, bits >> 23).float()
    mantissas = ((bits & 0x7FFFFF) + ROOT_HALF_BITS).view(torch.float32)
    rest = torch.where(near, -parts, mantissas - 1.0)
    sums = torch.full_like(rest, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        sums = sums * rest + coefficient
    return -(exponents * LN_2 + (rest + rest * rest * sums))


def _token_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """[n, vocab_size] int64, the 32 random bits of each token. Products of int64 wrap: their bits are those of unsigned
    ones."""
    mask = (1 << 32) - 1
    num_groups = -(-vocab_size // 64)
    key_0, key_1 = (seeds & mask)[:, None], ((seeds >> 32) & mask)[:, None]
    c_2 = torch.arange(num_groups * 16, device=seeds.device).expand(seeds.shape[0], -1)
    c_0, c_1 = (positions & mask)[:, None].expand_as(c_2), ((positions >> 32) & mask)[:, None].expand_as(c_2)
    c_3 = torch.zeros_like(c_2)
    for _ in range(10):
        first, second = c_0 * 0xD2511F53, c_2 * 0xCD9E8D57
        c_0, c_1, c_2, c_3 = (
            ((second >> 32) & mask) ^ c_1 ^ key_0,
            second & mask,
            ((first >> 32) & mask) ^ c_3 ^ key_1,
            first & mask,
        )
        key_0, key_1 = (key_0 + 0x9E3779B9) & mask, (key_1 + 0xBB67AE85) & mask
    words = torch.stack([part.view(-1, num_groups, 16) for part in (c_0, c_1, c_2, c_3)], dim=2)
    return words.flatten(1)[:, :vocab_size]


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
