"""The passes of sampling that many programs share: each has one split of one row.

First every split's highest logit. Then, for the rows that are drawn, the mass and the number of the tokens at or above
each of a few fixed thresholds: they say which range of weights the choice falls into. Last, the tokens of that range
are collected, in order of their ids, so that the search has a few thousand of them instead of the vocabulary.
Masses are added up as multiples of 2^-40, in integers, so their sums depend on no order.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.sampling.philox_jit import philox_uniform
from shared.kernels.sampling.weights_jit import KEY_OF_ONE, is_drawn, load_keys, row_peak

LEVELS = tl.constexpr(8)  # thresholds: 2^-3, 2^-6, … 2^-21, and min-p's
MASS_UNITS = tl.constexpr(1 << 40)  # of the likeliest token's mass


@triton.jit(do_not_specialize=["peaks", "peak_tokens", "num_splits"])
def find_peaks(
    logits,  # [num_rows, vocab_size] fp32
    peaks,  # [num_rows, num_splits] fp32, the highest logit; +inf where one is NaN or +inf
    peak_tokens,  # [num_rows, num_splits] int32, the lowest id that has it
    vocab_size,
    num_splits,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_splits, num_rows)."""
    split, row = tl.program_id(0), tl.program_id(1)
    base = logits + row.to(tl.int64) * vocab_size
    best = tl.full([TILE], float("-inf"), tl.float32)
    ids = tl.zeros([TILE], tl.int32)
    sound = tl.full([TILE], 1, tl.int32)
    first = split * SPLIT
    for start in range(first, tl.minimum(first + SPLIT, vocab_size), TILE):
        tokens = start + tl.arange(0, TILE)
        values = tl.load(base + tokens, mask=tokens < vocab_size, other=float("-inf"))
        ids = tl.where(values > best, tokens, ids)
        best = tl.maximum(best, values)
        sound = tl.where((values == values) & (values != float("inf")), sound, 0)
    peak = tl.max(best, 0)
    place = row.to(tl.int64) * num_splits + split
    tl.store(peak_tokens + place, tl.min(tl.where(best == peak, ids, vocab_size), 0))
    tl.store(peaks + place, tl.where(tl.min(sound, 0) == 1, peak, float("inf")))


@triton.jit
def level_thresholds(min_p):
    """[LEVELS] int32 keys, falling: none below min-p's, the last just that."""
    levels = tl.arange(0, LEVELS)
    weights = tl.where(levels == LEVELS - 1, 0.0, tl.exp2(-3.0 * (levels + 1).to(tl.float32)))
    return tl.maximum(weights, min_p).to(tl.int32, bitcast=True)


@triton.jit(
    do_not_specialize=["peaks", "peak_tokens", "temperatures", "min_ps", "level_masses", "level_counts", "num_splits"]
)
def measure_levels(
    logits,  # [num_rows, vocab_size] fp32
    peaks,  # [num_rows, num_splits] fp32
    peak_tokens,  # [num_rows, num_splits] int32
    temperatures,  # [num_rows] fp32
    min_ps,  # [num_rows] fp32
    level_masses,  # [num_rows, LEVELS, num_splits] int64, of the tokens at or above each threshold
    level_counts,  # [num_rows, LEVELS, num_splits] int32, their number
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_splits, num_rows). Writes nothing for a row that is not drawn."""
    split, row = tl.program_id(0), tl.program_id(1)
    peak, token = row_peak(peaks, peak_tokens, row, num_splits, SPLITS)
    temperature = tl.load(temperatures + row)
    if not is_drawn(peak, token, temperature):
        return
    base = logits + row.to(tl.int64) * vocab_size
    thresholds = level_thresholds(tl.load(min_ps + row))
    masses = tl.zeros([LEVELS, TILE], tl.int64)
    counts = tl.zeros([LEVELS, TILE], tl.int32)
    first = split * SPLIT
    for start in range(first, tl.minimum(first + SPLIT, vocab_size), TILE):
        weights, keys = load_keys(base, start, vocab_size, peak, temperature, TILE)
        inside = keys[None, :] >= thresholds[:, None]
        masses += tl.where(inside, (weights * MASS_UNITS).to(tl.int64)[None, :], 0)
        counts += inside.to(tl.int32)
    places = (row.to(tl.int64) * LEVELS + tl.arange(0, LEVELS)) * num_splits + split
    tl.store(level_masses + places, tl.sum(masses, 1))
    tl.store(level_counts + places, tl.sum(counts, 1))


@triton.jit
def level_totals(level_masses, level_counts, row, num_splits, SPLITS: tl.constexpr):
    """(masses [LEVELS] fp64, counts [LEVELS] int32, counts [LEVELS, SPLITS] int32) of one row."""
    splits = tl.arange(0, SPLITS)
    places = (row.to(tl.int64) * LEVELS + tl.arange(0, LEVELS))[:, None] * num_splits + splits[None, :]
    live = (splits < num_splits)[None, :]
    masses = tl.load(level_masses + places, mask=live, other=0)
    counts = tl.load(level_counts + places, mask=live, other=0)
    return tl.sum(masses, 1).to(tl.float64) / MASS_UNITS, tl.sum(counts, 1), counts


@triton.jit
def at(values, index):
    """values[index] of a [LEVELS] vector; 0 for -1."""
    return tl.sum(tl.where(tl.arange(0, LEVELS) == index, values, 0), 0)


@triton.jit
def choose_range(masses, counts, thresholds, top_k, top_p, point):
    """Which weights can decide the row's choice: (level, low key, high key, mass above, number above).

    Top-k and top-p cut somewhere below the peak, so everything from their level up. Without them the drawn token's
    level alone, with what lies above it as a sum.
    """
    kept = at(masses, LEVELS - 1)
    cuts = ((top_k > 0) & (top_k < at(counts, LEVELS - 1))) | (top_p < 1.0)
    goal = tl.where(top_p < 1.0, top_p * kept, point * kept)
    reaches = tl.where(cuts & (top_p < 1.0), masses >= goal, masses > goal)
    if (top_k > 0) & (top_k < at(counts, LEVELS - 1)):
        reaches = counts >= top_k
    level = tl.minimum(tl.sum((reaches == 0).to(tl.int32), 0), LEVELS - 1)
    above = tl.where(cuts, -1, level - 1)
    high = tl.where(above >= 0, at(thresholds, above) - 1, KEY_OF_ONE)
    return level, at(thresholds, level), high, at(masses, above), at(counts, above)


@triton.jit(
    do_not_specialize=[
        "peaks", "peak_tokens", "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions", "level_masses",
        "level_counts", "listed", "listed_tokens", "num_splits",
    ]
)  # fmt: skip
def collect_range(
    logits,  # [num_rows, vocab_size] fp32
    peaks,  # [num_rows, num_splits] fp32
    peak_tokens,  # [num_rows, num_splits] int32
    temperatures,  # [num_rows] fp32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] fp64
    min_ps,  # [num_rows] fp32
    seeds,  # [num_rows] int64
    positions,  # [num_rows] int64
    level_masses,  # [num_rows, LEVELS, num_splits] int64
    level_counts,  # [num_rows, LEVELS, num_splits] int32
    listed,  # [num_rows, CAPACITY] fp32, logits of the range's tokens
    listed_tokens,  # [num_rows, CAPACITY] int32, their ids, rising
    vocab_size,
    num_splits,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_splits, num_rows). Writes nothing for a row that is not drawn or whose range does not fit."""
    split, row = tl.program_id(0), tl.program_id(1)
    peak, token = row_peak(peaks, peak_tokens, row, num_splits, SPLITS)
    temperature = tl.load(temperatures + row)
    if not is_drawn(peak, token, temperature):
        return
    thresholds = level_thresholds(tl.load(min_ps + row))
    masses, counts, split_counts = level_totals(level_masses, level_counts, row, num_splits, SPLITS)
    point = philox_uniform(tl.load(seeds + row), tl.load(positions + row))
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    level, low, high, _mass_above, count_above = choose_range(masses, counts, thresholds, top_k, top_p, point)
    if at(counts, level) - count_above > CAPACITY:
        return
    # Tokens of the splits before this one that lie in the range: at or above its level, less those above it.
    levels = tl.arange(0, LEVELS)[:, None]
    inside = (levels == level).to(tl.int32) - ((levels == level - 1) & (count_above > 0)).to(tl.int32)
    before = tl.where((tl.arange(0, SPLITS) < split)[None, :], split_counts * inside, 0)
    place = tl.sum(tl.sum(before, 1), 0)
    base = logits + row.to(tl.int64) * vocab_size
    first = split * SPLIT
    for start in range(first, tl.minimum(first + SPLIT, vocab_size), TILE):
        _, keys = load_keys(base, start, vocab_size, peak, temperature, TILE)
        chosen = (keys >= low) & (keys <= high)
        ranks = tl.cumsum(chosen.to(tl.int32), 0)
        tokens = start + tl.arange(0, TILE)
        places = row.to(tl.int64) * CAPACITY + place + ranks - 1
        tl.store(listed + places, tl.load(base + tokens, mask=chosen, other=0.0), mask=chosen)
        tl.store(listed_tokens + places, tokens, mask=chosen)
        place += tl.sum(chosen.to(tl.int32), 0)
