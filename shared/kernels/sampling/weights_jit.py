"""What the sampling kernels share: a row's peak from those of its splits, and its weights.

The weight of a token is `exp(logit / temperature - peak / temperature)`, 1 for the likeliest: its probability without
the common sum, which no choice depends on. It is computed where it is needed and never stored. Weights are not
negative, so their bits, read as integers, have their order: these are the keys.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

KEY_OF_ONE = tl.constexpr(0x3F800000)


@triton.jit
def row_peak(peaks, peak_tokens, row, num_splits, SPLITS: tl.constexpr):
    """(highest logit, the lowest id that has it) of one row, from [num_rows, num_splits] peaks; -1 for a broken row."""
    splits = tl.arange(0, SPLITS)
    places = row.to(tl.int64) * num_splits + splits
    highest = tl.load(peaks + places, mask=splits < num_splits, other=float("-inf"))
    ids = tl.load(peak_tokens + places, mask=splits < num_splits, other=0x7FFFFFFF)
    peak = tl.max(highest, 0)
    token = tl.min(tl.where(highest == peak, ids, 0x7FFFFFFF), 0)
    return peak, tl.where((peak != float("inf")) & (peak != float("-inf")), token, -1)


@triton.jit
def is_drawn(peak, token, temperature):
    """Whether a row's token is drawn rather than its likeliest: it is sound, not greedy, and its quotient finite."""
    quotient = peak / tl.where(temperature > 0.0, temperature, 1.0)
    return (token >= 0) & (temperature > 0.0) & (quotient - quotient == 0.0)


@triton.jit
def load_keys(row, start, size, peak, temperature, TILE: tl.constexpr):
    """(weights [TILE] fp32, their bits [TILE] int32, -1 past the row's end, so below every threshold)."""
    places = start + tl.arange(0, TILE)
    logits = tl.load(row + places, mask=places < size, other=float("-inf"))
    weights = tl.exp(logits / temperature - peak / temperature)
    return weights, tl.where(places < size, weights.to(tl.int32, bitcast=True), -1)
