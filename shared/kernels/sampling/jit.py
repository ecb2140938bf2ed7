"""The last pass of sampling in Triton, without a sort: a search over weights finds where top-k and top-p end.

For any threshold one pass over the tokens gives the mass and the number of those at or above it, which is all that
top-k and top-p ask of the sorted row. The passes go over the tokens that `split_jit` listed, a few hundred; over the
whole row where more could matter than a list holds. Masses are added up in fp64, as in the reference. Those of the
listed tokens that are left race, against the winners of the splits.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.sampling.philox_jit import times_of_tokens
from shared.kernels.sampling.ranges_jit import FIELDS, HAS_CUT, IS_BY_COUNT, SHARES, at
from shared.kernels.sampling.split_jit import faster, winner
from shared.kernels.sampling.weights_jit import load_keys, row_peak

COUNT_AT_LEAST = tl.constexpr(0)
MASS_AT_LEAST = tl.constexpr(1)

NARROW = tl.constexpr(1 << 20)  # keys that lie closer differ by an eighth at most: they may well be of equal tokens


@triton.jit
def at_or_above(
    row,  # [size] fp32 logits
    size,
    peak,
    temperature,
    thresholds,  # [WAYS] int32
    ceiling,  # int32: keys above it are not looked at
    base_mass,  # fp64: of the tokens above the ceiling
    base_count,  # int32: their number
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """For each threshold, the tokens at or above it: (mass fp64, number int32)."""
    masses = tl.zeros([WAYS, TILE], tl.float64)
    counts = tl.zeros([WAYS, TILE], tl.int32)
    for start in range(0, size, TILE):
        weights, keys = load_keys(row, start, size, peak, temperature, TILE)
        inside = tl.where(keys > ceiling, -1, keys)[None, :] >= thresholds[:, None]
        masses += tl.where(inside, weights.to(tl.float64)[None, :], 0.0)
        counts += inside.to(tl.int32)
    return tl.sum(masses, 1) + base_mass, tl.sum(counts, 1) + base_count


@triton.jit
def extent(row, size, peak, temperature, low, high, TILE: tl.constexpr):
    """(lowest, highest) key of the tokens whose keys lie in [low, high]; there is one at least."""
    lowest = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    highest = tl.full([TILE], -1, tl.int32)
    for start in range(0, size, TILE):
        _, keys = load_keys(row, start, size, peak, temperature, TILE)
        inside = (keys >= low) & (keys <= high)
        lowest = tl.where(inside, tl.minimum(lowest, keys), lowest)
        highest = tl.where(inside, tl.maximum(highest, keys), highest)
    return tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def search(
    row,  # [size] fp32 logits
    size,
    peak,
    temperature,
    ceiling,  # int32: no key above it is in the range
    base_mass,  # fp64: of the tokens above it
    base_count,  # int32: their number
    low,  # int32: a threshold that reaches the goal
    mass,  # fp64: of the tokens at or above low
    count,  # int32: their number
    high,  # int32: no key above it reaches the goal
    mass_above,  # fp64: of the tokens above high
    count_above,  # int32: their number
    goal,  # fp64
    KIND: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The highest threshold at which the tokens at or above it reach the goal, as a range [low, high] of keys.

    The range ends up with one token, or with several of one weight. Returns (low, mass, count, high, mass_above,
    count_above): at or above low, and above high.
    """
    while (low < high) & (count - count_above > 1):
        step = (high - low) // WAYS + 1
        thresholds = low + tl.arange(0, WAYS) * step
        masses, counts = at_or_above(
            row, size, peak, temperature, thresholds, ceiling, base_mass, base_count, WAYS, TILE
        )  # fmt: skip
        reaches = counts.to(tl.float64) >= goal if KIND == COUNT_AT_LEAST else masses >= goal
        # Sums over fewer tokens are never larger, so those that reach come first; low reaches whatever rounding says.
        best = tl.maximum(tl.sum((reaches & (thresholds <= high)).to(tl.int32), 0) - 1, 0)
        if (best + 1 < WAYS) & (low + (best + 1) * step <= high):
            mass_above = at(masses, best + 1, WAYS)
            count_above = at(counts, best + 1, WAYS)
            high = low + (best + 1) * step - 1
        mass = at(masses, best, WAYS)
        count = at(counts, best, WAYS)
        low += best * step
        if (high - low < NARROW) & (count - count_above > 1):
            low, high = extent(row, size, peak, temperature, low, high, TILE)
    return low, mass, count, high, mass_above, count_above


@triton.jit
def find_cut(
    row,  # [size] fp32 logits of the range, or of the whole vocabulary
    size,
    peak,
    temperature,
    cut_low,  # int32: the lowest key of the range
    cut_high,  # int32: its highest
    cut_mass,  # fp64: of the tokens above it
    cut_count,  # int32: their number
    by_count,  # whether top-k cuts
    kept_mass,  # fp64: of the tokens that min-p keeps
    kept_count,  # int32: their number
    top_k,
    top_p,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """(low, high, ties): min-p, top-k and top-p leave everything above `high`, and the first `ties` of the tokens with
    keys in [low, high], which have one weight."""
    ways = tl.arange(0, WAYS)
    masses, counts = at_or_above(
        row, size, peak, temperature, cut_low + ways * 0, cut_high, cut_mass, cut_count, WAYS, TILE
    )  # fmt: skip
    low, high, mass, count = cut_low, cut_high, at(masses, 0, WAYS), at(counts, 0, WAYS)
    # How many tokens come before the last weight says which weight is meant.
    before, ties = kept_count * 0 - 1, kept_count
    if by_count:
        low, mass, count, high, mass_before, before = search(
            row, size, peak, temperature, cut_high, cut_mass, cut_count, low, mass, count, cut_high, cut_mass,
            cut_count, top_k.to(tl.float64), COUNT_AT_LEAST, WAYS, TILE,
        )  # fmt: skip
        ties = top_k - before
        kept_mass = mass_before + (mass - mass_before) * ties.to(tl.float64) / (count - before).to(tl.float64)
    if top_p < 1.0:
        goal = top_p * kept_mass
        low, mass, count, high, mass_before, count_before = search(
            row, size, peak, temperature, cut_high, cut_mass, cut_count, low, mass, count, cut_high, cut_mass,
            cut_count, goal, MASS_AT_LEAST, WAYS, TILE,
        )  # fmt: skip
        each = (mass - mass_before) / (count - count_before).to(tl.float64)
        # All that have less than the goal before them: the one that crosses it is still in.
        wanted = tl.ceil((goal - mass_before) / each).to(tl.int32)
        most = tl.where(count_before == before, ties, count - count_before)
        ties = tl.minimum(tl.maximum(wanted, 1), most)
    return low, high, ties


@triton.jit
def race_listed(
    row,  # [size] fp32 logits
    ids,  # [size] int32, theirs
    num_ids,  # size, or 0: their ids are their places
    size,
    peak,
    temperature,
    low,  # these as of `find_cut`
    high,
    ties,
    seed,
    position,
    TILE: tl.constexpr,
):
    """The winner (speed, id) of the tokens that are left; a speed of -1 where there is none."""
    speeds = tl.full([TILE], -1.0, tl.float32)
    fastest = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    seen = ties * 0
    for start in range(0, size, TILE):
        weights, keys = load_keys(row, start, size, peak, temperature, TILE)
        places = start + tl.arange(0, TILE)
        is_last = (keys >= low) & (keys <= high)
        runs = (keys > high) | (is_last & (seen + tl.cumsum(is_last.to(tl.int32), 0) <= ties))
        seen += tl.sum(is_last.to(tl.int32), 0)
        tokens = tl.where(num_ids > 0, tl.load(ids + places, mask=places < num_ids, other=0), places)
        speed = tl.where(runs, weights / times_of_tokens(seed, position, tokens), -1.0)
        speeds, fastest = faster(speeds, fastest, speed, tokens)
    return winner(speeds, fastest)


@triton.jit(
    # `logits` too: it and `listed` meet in one pointer, and Triton 3.6's compiler for AMD fails where it knows more of
    # the one than of the other (triton-lang/triton issue 9859). What it infers of one pointer is lost there anyway.
    do_not_specialize=[
        "logits", "peaks", "peak_tokens", "temperatures", "top_ks", "top_ps", "seeds", "positions", "fields", "shares",
        "listed", "listed_tokens", "speeds", "fastest", "tokens", "num_splits",
    ]
)  # fmt: skip
def choose_tokens(
    logits,  # [num_rows, vocab_size] fp32
    peaks,  # [num_rows, num_splits] fp32
    peak_tokens,  # [num_rows, num_splits] int32
    temperatures,  # [num_rows] fp32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] fp64
    seeds,  # [num_rows] int64
    positions,  # [num_rows] int64
    fields,  # [num_rows, FIELDS] int32
    shares,  # [num_rows, SHARES] fp64
    listed,  # [num_rows, CAPACITY] fp32
    listed_tokens,  # [num_rows, CAPACITY] int32
    speeds,  # [num_rows, num_splits] fp32
    fastest,  # [num_rows, num_splits] int32
    tokens,  # [num_rows] int64
    vocab_size,
    num_splits,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_rows,): one token."""
    row = tl.program_id(0)
    peak, token = row_peak(peaks, peak_tokens, row, num_splits, SPLITS)
    temperature = tl.load(temperatures + row)
    mine, masses = fields + row * FIELDS, shares + row * SHARES
    kind = tl.load(mine)
    if kind != 0:
        splits = tl.arange(0, SPLITS)
        places, is_there = row.to(tl.int64) * num_splits + splits, splits < num_splits
        speed, token = winner(
            tl.load(speeds + places, mask=is_there, other=-1.0),
            tl.load(fastest + places, mask=is_there, other=0x7FFFFFFF),
        )
        if (kind & HAS_CUT) != 0:
            num_listed = tl.load(mine + 1)
            is_listed = num_listed <= CAPACITY
            offset = row.to(tl.int64)
            values = tl.where(is_listed, listed + offset * CAPACITY, logits + offset * vocab_size)
            size = tl.where(is_listed, num_listed, vocab_size)
            low, high, ties = find_cut(
                values, size, peak, temperature, tl.load(mine + 3), tl.load(mine + 4), tl.load(masses + 2),
                tl.load(mine + 5), (kind & IS_BY_COUNT) != 0, tl.load(masses + 1), tl.load(mine + 2),
                tl.load(top_ks + row), tl.load(top_ps + row), WAYS, TILE,
            )  # fmt: skip
            listed_speed, listed_token = race_listed(
                values, listed_tokens + offset * CAPACITY, tl.where(is_listed, num_listed, 0), size, peak, temperature,
                low, high, ties, tl.load(seeds + row), tl.load(positions + row), TILE,
            )  # fmt: skip
            speed, token = faster(speed, token, listed_speed, listed_token)
    elif temperature > 0.0:
        token = -1  # broken, or a temperature so low that the quotient overflows
    tl.store(tokens + row, token.to(tl.int64))
