"""The last pass of sampling in Triton, without a sort: a search over weights finds the token that a sort would lead to.

For any threshold one pass over the tokens gives the mass and the number of those at or above it, which is all that
top-k, top-p and the draw ask of the sorted row. The passes go over the tokens that `split_jit` listed, a few thousand;
over the whole row where more could matter. Masses are added up in fp64, as in the reference.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.sampling.philox_jit import philox_uniform
from shared.kernels.sampling.split_jit import LEVELS, at, choose_range, level_thresholds, level_totals
from shared.kernels.sampling.weights_jit import is_drawn, load_keys, row_peak

COUNT_AT_LEAST = tl.constexpr(0)
MASS_AT_LEAST = tl.constexpr(1)
MASS_OVER = tl.constexpr(2)

NARROW = tl.constexpr(1 << 20)  # keys that lie closer differ by an eighth at most: they may well be of equal tokens


@triton.jit
def at_or_above(
    row,  # [size] fp32 logits
    size,
    peak,
    temperature,
    thresholds,  # [WAYS] int32
    base_mass,  # of tokens above all of the row's, where it is a list
    base_count,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """For each threshold, the tokens at or above it: (mass fp64, number int32)."""
    masses = tl.zeros([WAYS, TILE], tl.float64)
    counts = tl.zeros([WAYS, TILE], tl.int32)
    for start in range(0, size, TILE):
        weights, keys = load_keys(row, start, size, peak, temperature, TILE)
        inside = keys[None, :] >= thresholds[:, None]
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
def entry(values, index, WAYS: tl.constexpr):
    """values[index] of a [WAYS] vector; 0 past its end."""
    return tl.sum(tl.where(tl.arange(0, WAYS) == index, values, 0), 0)


@triton.jit
def search(
    row,  # [size] fp32 logits
    size,
    peak,
    temperature,
    base_mass,  # fp64: of tokens above all of the row's, where it is a list
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
            row, size, peak, temperature, thresholds, base_mass, base_count, WAYS, TILE
        )  # fmt: skip
        if KIND == COUNT_AT_LEAST:
            reaches = counts.to(tl.float64) >= goal
        elif KIND == MASS_AT_LEAST:
            reaches = masses >= goal
        else:
            reaches = masses > goal
        # Sums over fewer tokens are never larger, so those that reach come first; low reaches whatever rounding says.
        best = tl.maximum(tl.sum((reaches & (thresholds <= high)).to(tl.int32), 0) - 1, 0)
        if (best + 1 < WAYS) & (low + (best + 1) * step <= high):
            mass_above = entry(masses, best + 1, WAYS)
            count_above = entry(counts, best + 1, WAYS)
            high = low + (best + 1) * step - 1
        mass = entry(masses, best, WAYS)
        count = entry(counts, best, WAYS)
        low += best * step
        if (high - low < NARROW) & (count - count_above > 1):
            low, high = extent(row, size, peak, temperature, low, high, TILE)
    return low, mass, count, high, mass_above, count_above


@triton.jit
def nth_place(row, size, peak, temperature, low, high, rank, TILE: tl.constexpr):
    """The place of number `rank`, in order of places, among the tokens with a key in [low, high]."""
    start = rank * 0
    seen = rank * 0
    here = tl.sum(in_range(row, start, size, peak, temperature, low, high, TILE), 0)
    while (seen + here <= rank) & (start < size):
        seen += here
        start += TILE
        here = tl.sum(in_range(row, start, size, peak, temperature, low, high, TILE), 0)
    inside = in_range(row, start, size, peak, temperature, low, high, TILE)
    chosen = (inside == 1) & (seen + tl.cumsum(inside, 0) == rank + 1)
    return start + tl.sum(tl.where(chosen, tl.arange(0, TILE), 0), 0)


@triton.jit
def in_range(row, start, size, peak, temperature, low, high, TILE: tl.constexpr):
    """[TILE] int32: 1 where a token's key lies in [low, high]."""
    _, keys = load_keys(row, start, size, peak, temperature, TILE)
    return ((keys >= low) & (keys <= high)).to(tl.int32)


@triton.jit
def drawn(
    row,  # [size] fp32 logits of the range, or of the whole vocabulary
    size,
    peak,
    temperature,
    base_mass,
    base_count,
    low,  # int32: the range's lowest key
    high,  # int32: its highest
    mass_above,  # fp64: of the tokens above it
    count_above,  # int32: their number
    kept_mass,  # fp64: of the tokens that min-p keeps
    kept_count,  # int32: their number
    top_k,
    top_p,
    point,  # fp64 in [0, 1)
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The place in `row` of the token at `point` of the mass that min-p, top-k and top-p leave, tokens in order of
    falling weight."""
    floor = low + tl.arange(0, WAYS) * 0
    masses, counts = at_or_above(row, size, peak, temperature, floor, base_mass, base_count, WAYS, TILE)
    mass, count = entry(masses, 0, WAYS), entry(counts, 0, WAYS)
    # What is left is everything above some weight and the first `ties` tokens of just that one; how many tokens come
    # before these says which weight is meant.
    before, ties = kept_count * 0 - 1, kept_count
    if (top_k > 0) & (top_k < kept_count):
        low, mass, count, _, mass_before, before = search(
            row, size, peak, temperature, base_mass, base_count, low, mass, count, high, mass_above, count_above,
            top_k.to(tl.float64), COUNT_AT_LEAST, WAYS, TILE,
        )  # fmt: skip
        ties = top_k - before
        kept_mass = mass_before + (mass - mass_before) * ties.to(tl.float64) / (count - before).to(tl.float64)
    if top_p < 1.0:
        goal = top_p * kept_mass
        low, mass, count, _, mass_before, count_before = search(
            row, size, peak, temperature, base_mass, base_count, low, mass, count, high, mass_above, count_above,
            goal, MASS_AT_LEAST, WAYS, TILE,
        )  # fmt: skip
        each = (mass - mass_before) / (count - count_before).to(tl.float64)
        # All that have less than the goal before them: the one that crosses it is still in.
        wanted = tl.ceil((goal - mass_before) / each).to(tl.int32)
        most = tl.where(count_before == before, ties, count - count_before)
        before, ties = count_before, tl.minimum(tl.maximum(wanted, 1), most)
        kept_mass = mass_before + each * ties.to(tl.float64)
    goal = point * kept_mass
    low, mass, count, high, mass_above, count_above = search(
        row, size, peak, temperature, base_mass, base_count, low, mass, count, high, mass_above, count_above,
        goal, MASS_OVER, WAYS, TILE,
    )  # fmt: skip
    each = (mass - mass_above) / (count - count_above).to(tl.float64)
    rank = tl.floor((goal - mass_above) / each).to(tl.int32)
    most = tl.where(count_above == before, ties, count - count_above)
    rank = tl.minimum(tl.maximum(rank, 0), most - 1)
    return nth_place(row, size, peak, temperature, low, high, rank, TILE)


@triton.jit(
    # `logits` too: it and `listed` meet in one pointer, and Triton 3.6's compiler for AMD fails where it knows more of
    # the one than of the other (triton-lang/triton issue 9859). What it infers of one pointer is lost there anyway.
    do_not_specialize=[
        "logits", "peaks", "peak_tokens", "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions",
        "level_masses", "level_counts", "listed", "listed_tokens", "tokens", "num_splits",
    ]
)  # fmt: skip
def choose_tokens(
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
    listed,  # [num_rows, CAPACITY] fp32
    listed_tokens,  # [num_rows, CAPACITY] int32
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
    if is_drawn(peak, token, temperature):
        thresholds = level_thresholds(tl.load(min_ps + row))
        masses, counts, _ = level_totals(level_masses, level_counts, row, num_splits, SPLITS)
        point = philox_uniform(tl.load(seeds + row), tl.load(positions + row))
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        level, low, high, mass_above, count_above = choose_range(masses, counts, thresholds, top_k, top_p, point)
        num_listed = at(counts, level) - count_above
        is_listed = num_listed <= CAPACITY
        offset = row.to(tl.int64)
        place = drawn(
            tl.where(is_listed, listed + offset * CAPACITY, logits + offset * vocab_size),
            tl.where(is_listed, num_listed, vocab_size),
            peak,
            temperature,
            tl.where(is_listed, mass_above, 0.0),
            tl.where(is_listed, count_above, 0),
            low,
            high,
            mass_above,
            count_above,
            at(masses, LEVELS - 1),
            at(counts, LEVELS - 1),
            top_k,
            top_p,
            point,
            WAYS,
            TILE,
        )
        token = tl.where(is_listed, tl.load(listed_tokens + offset * CAPACITY + place, mask=is_listed, other=0), place)
    elif tl.load(temperatures + row) > 0.0:
        token = -1  # broken, or a temperature so low that the quotient overflows
    tl.store(tokens + row, token.to(tl.int64))
