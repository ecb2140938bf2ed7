"""The passes of sampling that many programs share: each has one split of one row, which it holds in registers.

First every split's highest logit. Then, for the rows that are drawn, the mass and the number of the tokens at or above
each of a few fixed thresholds. From these `ranges_jit` says which range of weights top-p's cut falls into, and which
one the draw. Where they have many tokens, thresholds between their ends narrow both. Last, the tokens of both ranges
are collected, in order of their ids, so that the search has a few hundred of them instead of the vocabulary.
Masses are added up as multiples of 2^-40, in integers, so their sums depend on no order.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.sampling.ranges_jit import (
    COUNT_BITS,
    FIELDS,
    FINE,
    HAS_CUT,
    IS_BY_COUNT,
    IS_REFINED,
    LEVELS,
    MASS_UNITS,
    SHARES,
    TOTALS,
    fine_thresholds,
    level_thresholds,
)
from shared.kernels.sampling.weights_jit import is_drawn, load_keys, row_peak

LONGEST_SPLIT = tl.constexpr(1 << 11)  # whose total has room in 64 bits: a mass of 2^51, a number of 2^11


@triton.jit(do_not_specialize=["peaks", "peak_tokens", "num_splits"])
def find_peaks(
    logits,  # [num_rows, vocab_size] fp32
    peaks,  # [num_rows, num_splits] fp32, the highest logit; +inf where one is NaN or +inf
    peak_tokens,  # [num_rows, num_splits] int32, the lowest id that has it
    vocab_size,
    num_splits,
    SPLIT: tl.constexpr,
):
    """Grid (num_splits, num_rows)."""
    split, row = tl.program_id(0), tl.program_id(1)
    tokens = split * SPLIT + tl.arange(0, SPLIT)
    values = tl.load(logits + row.to(tl.int64) * vocab_size + tokens, mask=tokens < vocab_size, other=float("-inf"))
    sound = (values == values) & (values != float("inf"))
    values = tl.where(sound, values, float("-inf"))
    peak = tl.max(values, 0)
    place = row.to(tl.int64) * num_splits + split
    tl.store(peak_tokens + place, tl.min(tl.where(values == peak, tokens, vocab_size), 0))
    tl.store(peaks + place, tl.where(tl.min(sound.to(tl.int32), 0) == 1, peak, float("inf")))


@triton.jit
def store_totals(totals, row, first, split, num_splits, weights, keys, thresholds, SIZE: tl.constexpr):
    """For each of SIZE thresholds, the mass and the number of the split's tokens at or above it, as one integer."""
    entries = (weights * MASS_UNITS).to(tl.int64) + (tl.full([], 1, tl.int64) << COUNT_BITS)
    sums = tl.sum(tl.where(keys[None, :] >= thresholds[:, None], entries[None, :], 0), 1)
    tl.store(totals + (row.to(tl.int64) * TOTALS + first + tl.arange(0, SIZE)) * num_splits + split, sums)


@triton.jit(do_not_specialize=["peaks", "peak_tokens", "temperatures", "min_ps", "totals", "num_splits"])
def measure_levels(
    logits,  # [num_rows, vocab_size] fp32
    peaks,  # [num_rows, num_splits] fp32
    peak_tokens,  # [num_rows, num_splits] int32
    temperatures,  # [num_rows] fp32
    min_ps,  # [num_rows] fp32
    totals,  # [num_rows, TOTALS, num_splits] int64
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (num_splits, num_rows). Writes nothing for a row that is not drawn."""
    split, row = tl.program_id(0), tl.program_id(1)
    peak, token = row_peak(peaks, peak_tokens, row, num_splits, SPLITS)
    temperature = tl.load(temperatures + row)
    if not is_drawn(peak, token, temperature):
        return
    base = logits + row.to(tl.int64) * vocab_size
    weights, keys = load_keys(base, split * SPLIT, vocab_size, peak, temperature, SPLIT)
    thresholds = level_thresholds(tl.load(min_ps + row))
    store_totals(totals, row, 0, split, num_splits, weights, keys, thresholds, LEVELS)


@triton.jit(do_not_specialize=["temperatures", "fields", "shares", "totals", "num_splits"])
def refine_levels(
    logits,  # [num_rows, vocab_size] fp32
    temperatures,  # [num_rows] fp32
    fields,  # [num_rows, FIELDS] int32
    shares,  # [num_rows, SHARES] fp64
    totals,  # [num_rows, TOTALS, num_splits] int64
    vocab_size,
    num_splits,
    SPLIT: tl.constexpr,
):
    """Grid (num_splits, num_rows). Writes nothing for a row whose ranges need not be narrowed."""
    split, row = tl.program_id(0), tl.program_id(1)
    kind = tl.load(fields + row * FIELDS)
    if (kind & IS_REFINED) == 0:
        return
    peak, temperature = tl.load(shares + row * SHARES).to(tl.float32), tl.load(temperatures + row)
    base = logits + row.to(tl.int64) * vocab_size
    weights, keys = load_keys(base, split * SPLIT, vocab_size, peak, temperature, SPLIT)
    if (kind & HAS_CUT) != 0:
        thresholds = fine_thresholds(tl.load(fields + row * FIELDS + 3), tl.load(fields + row * FIELDS + 9))
        store_totals(totals, row, LEVELS, split, num_splits, weights, keys, thresholds, FINE)
    if (kind & IS_BY_COUNT) == 0:
        thresholds = fine_thresholds(tl.load(fields + row * FIELDS + 6), tl.load(fields + row * FIELDS + 7))
        store_totals(totals, row, LEVELS + FINE, split, num_splits, weights, keys, thresholds, FINE)


@triton.jit
def in_ranges(keys, cut_low, cut_high, draw_low, draw_high):
    """Whether keys lie in one of the two ranges, or between them where these meet."""
    meet = draw_low <= cut_high
    low, high = tl.minimum(cut_low, draw_low), tl.maximum(cut_high, draw_high)
    cut_low, cut_high = tl.where(meet, low, cut_low), tl.where(meet, high, cut_high)
    return ((keys >= cut_low) & (keys <= cut_high)) | ((keys >= draw_low) & (keys <= draw_high))


@triton.jit(
    do_not_specialize=["temperatures", "fields", "shares", "firsts", "listed", "listed_tokens", "num_splits"]
)  # fmt: skip
def collect_ranges(
    logits,  # [num_rows, vocab_size] fp32
    temperatures,  # [num_rows] fp32
    fields,  # [num_rows, FIELDS] int32
    shares,  # [num_rows, SHARES] fp64
    firsts,  # [num_rows, num_splits] int32
    listed,  # [num_rows, CAPACITY] fp32, logits of the ranges' tokens
    listed_tokens,  # [num_rows, CAPACITY] int32, their ids, rising
    vocab_size,
    num_splits,
    CAPACITY: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (num_splits, num_rows). Writes nothing for a row that is not drawn or whose ranges do not fit."""
    split, row = tl.program_id(0), tl.program_id(1)
    kind, number = tl.load(fields + row * FIELDS), tl.load(fields + row * FIELDS + 1)
    if (kind == 0) | (number > CAPACITY):
        return
    peak, temperature = tl.load(shares + row * SHARES).to(tl.float32), tl.load(temperatures + row)
    base = logits + row.to(tl.int64) * vocab_size
    _, keys = load_keys(base, split * SPLIT, vocab_size, peak, temperature, SPLIT)
    cut_low, cut_high = tl.load(fields + row * FIELDS + 3), tl.load(fields + row * FIELDS + 4)
    draw_low, draw_high = tl.load(fields + row * FIELDS + 6), tl.load(fields + row * FIELDS + 7)
    chosen = in_ranges(keys, cut_low, cut_high, draw_low, draw_high)
    tokens = split * SPLIT + tl.arange(0, SPLIT)
    first = row.to(tl.int64) * CAPACITY + tl.load(firsts + row * num_splits + split)
    places = first + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(listed + places, tl.load(base + tokens, mask=chosen, other=0.0), mask=chosen)
    tl.store(listed_tokens + places, tokens, mask=chosen)
