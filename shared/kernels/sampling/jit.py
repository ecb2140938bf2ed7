"""The last pass of sampling in Triton, without a sort: a search over weights finds the token that a sort would lead to.

For any threshold one pass over the tokens gives the mass and the number of those at or above it, which is all that
top-k, top-p and the draw ask of the sorted row. The passes go over the tokens that `split_jit` listed, a few hundred;
over the whole row where more could matter than a list holds. Masses are added up in fp64, as in the reference.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.sampling.philox_jit import philox_uniform
from shared.kernels.sampling.ranges_jit import FIELDS, HAS_CUT, IS_BY_COUNT, SHARES
from shared.kernels.sampling.weights_jit import load_keys, row_peak

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
def entry(values, index, WAYS: tl.constexpr):
    """values[index] of a [WAYS] vector; 0 past its end."""
    return tl.sum(tl.where(tl.arange(0, WAYS) == index, values, 0), 0)


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
    row,  # [size] fp32 logits of the ranges, or of the whole vocabulary
    size,
    peak,
    temperature,
    cut_low,  # int32: the lowest key of the range that has top-k's and top-p's cuts
    cut_high,  # int32: its highest
    cut_mass,  # fp64: of the tokens above it
    cut_count,  # int32: their number
    draw_low,  # likewise of the range that has the draw
    draw_high,
    draw_mass,
    draw_count,
    has_cut,  # whether either cuts
    by_count,  # whether top-k cuts
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
    ways = tl.arange(0, WAYS)
    # What is left is everything above some weight and the first `ties` tokens of just that one; how many tokens come
    # before these says which weight is meant.
    before, ties = kept_count * 0 - 1, kept_count
    least = draw_low
    if has_cut:
        masses, counts = at_or_above(
            row, size, peak, temperature, cut_low + ways * 0, cut_high, cut_mass, cut_count, WAYS, TILE
        )  # fmt: skip
        low, mass, count = cut_low, entry(masses, 0, WAYS), entry(counts, 0, WAYS)
        if by_count:
            low, mass, count, _, mass_before, before = search(
                row, size, peak, temperature, cut_high, cut_mass, cut_count, low, mass, count, cut_high, cut_mass,
                cut_count, top_k.to(tl.float64), COUNT_AT_LEAST, WAYS, TILE,
            )  # fmt: skip
            ties = top_k - before
            kept_mass = mass_before + (mass - mass_before) * ties.to(tl.float64) / (count - before).to(tl.float64)
        if top_p < 1.0:
            goal = top_p * kept_mass
            low, mass, count, _, mass_before, count_before = search(
                row, size, peak, temperature, cut_high, cut_mass, cut_count, low, mass, count, cut_high, cut_mass,
                cut_count, goal, MASS_AT_LEAST, WAYS, TILE,
            )  # fmt: skip
            each = (mass - mass_before) / (count - count_before).to(tl.float64)
            # All that have less than the goal before them: the one that crosses it is still in.
            wanted = tl.ceil((goal - mass_before) / each).to(tl.int32)
            most = tl.where(count_before == before, ties, count - count_before)
            before, ties = count_before, tl.minimum(tl.maximum(wanted, 1), most)
            kept_mass = mass_before + each * ties.to(tl.float64)
        least = tl.maximum(low, draw_low)
    masses, counts = at_or_above(
        row, size, peak, temperature, tl.where(ways == 0, draw_low, least), draw_high, draw_mass, draw_count, WAYS, TILE
    )  # fmt: skip
    # Nothing below the cut, unless rounding put it above the range.
    way = (entry(counts, 1, WAYS) > draw_count).to(tl.int32)
    goal = point * kept_mass
    low, mass, count, high, mass_above, count_above = search(
        row, size, peak, temperature, draw_high, draw_mass, draw_count, tl.where(way == 1, least, draw_low),
        entry(masses, way, WAYS), entry(counts, way, WAYS), draw_high, draw_mass, draw_count, goal, MASS_OVER, WAYS,
        TILE,
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
        "logits", "peaks", "peak_tokens", "temperatures", "top_ks", "top_ps", "seeds", "positions", "fields", "shares",
        "listed", "listed_tokens", "tokens", "num_splits",
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
        point = philox_uniform(tl.load(seeds + row), tl.load(positions + row))
        num_listed = tl.load(mine + 1)
        is_listed = num_listed <= CAPACITY
        offset = row.to(tl.int64)
        place = drawn(
            tl.where(is_listed, listed + offset * CAPACITY, logits + offset * vocab_size),
            tl.where(is_listed, num_listed, vocab_size),
            peak,
            temperature,
            tl.load(mine + 3),
            tl.load(mine + 4),
            tl.load(masses + 2),
            tl.load(mine + 5),
            tl.load(mine + 6),
            tl.load(mine + 7),
            tl.load(masses + 3),
            tl.load(mine + 8),
            (kind & HAS_CUT) != 0,
            (kind & IS_BY_COUNT) != 0,
            tl.load(masses + 1),
            tl.load(mine + 2),
            tl.load(top_ks + row),
            tl.load(top_ps + row),
            point,
            WAYS,
            TILE,
        )
        token = tl.where(is_listed, tl.load(listed_tokens + offset * CAPACITY + place, mask=is_listed, other=0), place)
    elif temperature > 0.0:
        token = -1  # broken, or a temperature so low that the quotient overflows
    tl.store(tokens + row, token.to(tl.int64))
