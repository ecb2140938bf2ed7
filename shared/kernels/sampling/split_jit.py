"""The passes of sampling that many programs share: each has one split of one row, which it holds in registers.

First every split's highest logit. Then, for the rows that top-k or top-p may cut, the mass and the number of the
tokens at or above each of a few fixed thresholds, from which `ranges_jit` says which range of weights the cut falls
into; where that has many tokens, thresholds between its ends narrow it. Last, the tokens that are left whatever the cut
is race, one winner a split, and those of the range are collected, in order of their ids, so that the search has a few
hundred of them instead of the vocabulary. Without a cut all tokens race.
Masses are added up as multiples of 2^-40, in integers, so their sums depend on no order.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.sampling.philox_jit import times_of, token_words
from shared.kernels.sampling.ranges_jit import (
    COUNT_BITS,
    FIELDS,
    FINE,
    HAS_CUT,
    IS_REFINED,
    LEVELS,
    MASS_UNITS,
    SHARES,
    TOTALS,
    fine_thresholds,
    level_thresholds,
    may_cut,
)
from shared.kernels.sampling.weights_jit import KEY_OF_ONE, is_drawn, load_keys, row_peak

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


@triton.jit(
    do_not_specialize=["peaks", "peak_tokens", "temperatures", "top_ks", "top_ps", "min_ps", "totals", "num_splits"]
)
def measure_levels(
    logits,  # [num_rows, vocab_size] fp32
    peaks,  # [num_rows, num_splits] fp32
    peak_tokens,  # [num_rows, num_splits] int32
    temperatures,  # [num_rows] fp32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] fp64
    min_ps,  # [num_rows] fp32
    totals,  # [num_rows, TOTALS, num_splits] int64
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (num_splits, num_rows). Writes nothing for a row that is not drawn, or that nothing may cut."""
    split, row = tl.program_id(0), tl.program_id(1)
    peak, token = row_peak(peaks, peak_tokens, row, num_splits, SPLITS)
    temperature = tl.load(temperatures + row)
    if not (is_drawn(peak, token, temperature) & may_cut(tl.load(top_ks + row), tl.load(top_ps + row))):
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
    thresholds = fine_thresholds(tl.load(fields + row * FIELDS + 3), tl.load(fields + row * FIELDS + 6))
    store_totals(totals, row, LEVELS, split, num_splits, weights, keys, thresholds, FINE)


@triton.jit
def faster(speed, token, other_speed, other_token):
    """The faster of two tokens, (speed, id); of equally fast ones the lower id."""
    is_other = (other_speed > speed) | ((other_speed == speed) & (other_token < token))
    return tl.where(is_other, other_speed, speed), tl.where(is_other, other_token, token)


@triton.jit
def winner(speeds, tokens):
    """The fastest of a vector of speeds and ids; of equally fast ones that of the lowest id."""
    speed = tl.max(speeds, 0)
    return speed, tl.min(tl.where(speeds == speed, tokens, 0x7FFFFFFF), 0)


@triton.jit
def race_split(base, start, size, peak, temperature, least, seed, position, SPLIT: tl.constexpr):
    """The winner (speed, id) of a row's tokens from `start` on, a multiple of SPLIT, with keys of at least `least`."""
    places = tl.arange(0, SPLIT // 4)
    words = token_words(seed, position, (start // 4 + places).to(tl.uint32))
    speeds = tl.full([SPLIT // 4], -1.0, tl.float32)
    fastest = tl.full([SPLIT // 4], 0x7FFFFFFF, tl.int32)
    for part in tl.static_range(4):
        tokens = start + (places >> 4) * 64 + part * 16 + (places & 15)
        logits = tl.load(base + tokens, mask=tokens < size, other=float("-inf"))
        weights = tl.exp(logits / temperature - peak / temperature)
        runs = (tokens < size) & (weights.to(tl.int32, bitcast=True) >= least)
        speeds, fastest = faster(speeds, fastest, tl.where(runs, weights / times_of(words[part]), -1.0), tokens)
    return winner(speeds, fastest)


@triton.jit(
    do_not_specialize=[
        "temperatures", "seeds", "positions", "fields", "shares", "firsts", "listed", "listed_tokens", "speeds",
        "fastest", "num_splits",
    ]
)  # fmt: skip
def race_and_collect(
    logits,  # [num_rows, vocab_size] fp32
    temperatures,  # [num_rows] fp32
    seeds,  # [num_rows] int64
    positions,  # [num_rows] int64
    fields,  # [num_rows, FIELDS] int32
    shares,  # [num_rows, SHARES] fp64
    firsts,  # [num_rows, num_splits] int32
    listed,  # [num_rows, CAPACITY] fp32, logits of the range's tokens
    listed_tokens,  # [num_rows, CAPACITY] int32, their ids, rising
    speeds,  # [num_rows, num_splits] fp32, of each split's winner; -1 where none of its tokens raced
    fastest,  # [num_rows, num_splits] int32, its id
    vocab_size,
    num_splits,
    CAPACITY: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (num_splits, num_rows). Writes nothing for a row that is not drawn, and no list where it does not fit."""
    split, row = tl.program_id(0), tl.program_id(1)
    mine = fields + row * FIELDS
    kind = tl.load(mine)
    if kind == 0:
        return
    peak, temperature = tl.load(shares + row * SHARES).to(tl.float32), tl.load(temperatures + row)
    base = logits + row.to(tl.int64) * vocab_size
    start = split * SPLIT
    least = tl.load(mine + 7)
    races = least <= KEY_OF_ONE
    if (kind & HAS_CUT) != 0:
        _, keys = load_keys(base, start, vocab_size, peak, temperature, SPLIT)
        races = tl.max(keys, 0) >= least
        if tl.load(mine + 1) <= CAPACITY:
            chosen = (keys >= tl.load(mine + 3)) & (keys <= tl.load(mine + 4))
            tokens = start + tl.arange(0, SPLIT)
            first = row.to(tl.int64) * CAPACITY + tl.load(firsts + row * num_splits + split)
            places = first + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(listed + places, tl.load(base + tokens, mask=chosen, other=0.0), mask=chosen)
            tl.store(listed_tokens + places, tokens, mask=chosen)
    place = row.to(tl.int64) * num_splits + split
    if races:
        speed, token = race_split(
            base, start, vocab_size, peak, temperature, least, tl.load(seeds + row), tl.load(positions + row), SPLIT
        )  # fmt: skip
        tl.store(speeds + place, speed)
        tl.store(fastest + place, token)
    else:
        tl.store(speeds + place, -1.0)
        tl.store(fastest + place, 0)
