"""Sampling in Triton, without a sort: a search over probabilities finds the token that a sort would lead to.

Probabilities are not negative, so their bits, read as integers, have their order. For any threshold one pass over
the row gives the mass and the number of the tokens at or above it, which is all that top-k, top-p and the draw
ask of the sorted row. Masses are added up in fp64, as in the reference.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

COUNT_AT_LEAST = tl.constexpr(0)
MASS_AT_LEAST = tl.constexpr(1)
MASS_OVER = tl.constexpr(2)

NARROW = tl.constexpr(1 << 20)  # keys that lie closer differ by an eighth at most: they may well be of equal tokens


@triton.jit
def philox_uniform(seed, position):
    """fp64 in [0, 1) with 53 random bits: `shared.kernels.sampling.philox.uniform` of two int64 scalars.

    Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011): the seed is the key, the position the counter.
    """
    mask = 0xFFFFFFFF
    key_0, key_1 = seed.to(tl.uint64) & mask, (seed.to(tl.uint64) >> 32) & mask
    c_0, c_1 = position.to(tl.uint64) & mask, (position.to(tl.uint64) >> 32) & mask
    c_2, c_3 = c_0 & 0, c_0 & 0
    for _ in tl.static_range(10):
        first, second = c_0 * 0xD2511F53, c_2 * 0xCD9E8D57
        c_0, c_1, c_2, c_3 = (
            (second >> 32) ^ c_1 ^ key_0,
            second & mask,
            (first >> 32) ^ c_3 ^ key_1,
            first & mask,
        )
        key_0 = (key_0 + 0x9E3779B9) & mask
        key_1 = (key_1 + 0xBB67AE85) & mask
    bits = (c_0 << 21) | (c_1 >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def load_keys(row, start, vocab_size, TILE: tl.constexpr):
    """(probabilities [TILE] fp32, their bits [TILE] int32, -1 past the row's end, so below every threshold)."""
    tokens = start + tl.arange(0, TILE)
    values = tl.load(row + tokens, mask=tokens < vocab_size, other=0.0)
    return values, tl.where(tokens < vocab_size, values.to(tl.int32, bitcast=True), -1)


@triton.jit
def at_or_above(row, vocab_size, thresholds, WAYS: tl.constexpr, TILE: tl.constexpr):
    """For each of the [WAYS] int32 thresholds, the tokens at or above it: (mass fp64, number int32)."""
    masses = tl.zeros([WAYS, TILE], tl.float64)
    counts = tl.zeros([WAYS, TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        values, keys = load_keys(row, start, vocab_size, TILE)
        inside = keys[None, :] >= thresholds[:, None]
        masses += tl.where(inside, values.to(tl.float64)[None, :], 0.0)
        counts += inside.to(tl.int32)
    return tl.sum(masses, 1), tl.sum(counts, 1)


@triton.jit
def extent(row, vocab_size, low, high, TILE: tl.constexpr):
    """(lowest, highest) key of the tokens whose keys lie in [low, high]; there is one at least."""
    lowest = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    highest = tl.full([TILE], -1, tl.int32)
    for start in range(0, vocab_size, TILE):
        _, keys = load_keys(row, start, vocab_size, TILE)
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
    row,  # [vocab_size] fp32 probabilities
    vocab_size,
    low,  # int32: a threshold that reaches the goal
    mass,  # fp64: of the tokens at or above low
    count,  # int32: their number
    high,  # int32: the highest key there is
    goal,  # fp64
    KIND: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The highest threshold at which the tokens at or above it reach the goal, as a range [low, high] of keys.

    The range ends up with one token, or with several of one probability. Returns (low, mass, count, high,
    mass_above, count_above): at or above low, and above high.
    """
    mass_above = mass * 0
    count_above = count * 0
    while (low < high) & (count - count_above > 1):
        step = (high - low) // WAYS + 1
        thresholds = low + tl.arange(0, WAYS) * step
        masses, counts = at_or_above(row, vocab_size, thresholds, WAYS, TILE)
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
            low, high = extent(row, vocab_size, low, high, TILE)
    return low, mass, count, high, mass_above, count_above


@triton.jit
def nth_token(row, vocab_size, low, high, rank, TILE: tl.constexpr):
    """The id of the token number `rank`, in order of ids, among those with a key in [low, high]."""
    start = rank * 0
    seen = rank * 0
    here = tl.sum(in_range(row, start, vocab_size, low, high, TILE), 0)
    while (seen + here <= rank) & (start < vocab_size):
        seen += here
        start += TILE
        here = tl.sum(in_range(row, start, vocab_size, low, high, TILE), 0)
    inside = in_range(row, start, vocab_size, low, high, TILE)
    chosen = (inside == 1) & (seen + tl.cumsum(inside, 0) == rank + 1)
    return start + tl.sum(tl.where(chosen, tl.arange(0, TILE), 0), 0)


@triton.jit
def in_range(row, start, vocab_size, low, high, TILE: tl.constexpr):
    """[TILE] int32: 1 where a token's key lies in [low, high]."""
    _, keys = load_keys(row, start, vocab_size, TILE)
    return ((keys >= low) & (keys <= high)).to(tl.int32)


@triton.jit
def argmax(logits, vocab_size, TILE: tl.constexpr):
    """The lowest id of the highest logit; -1 where a logit is NaN or +inf, or none is finite."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    ids = tl.zeros([TILE], tl.int32)
    sound = tl.full([TILE], 1, tl.int32)
    for start in range(0, vocab_size, TILE):
        tokens = start + tl.arange(0, TILE)
        values = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
        ids = tl.where(values > best, tokens, ids)
        best = tl.maximum(best, values)
        sound = tl.where((values == values) & (values != float("inf")), sound, 0)
    peak = tl.max(best, 0)
    token = tl.min(tl.where(best == peak, ids, vocab_size), 0)
    return tl.where((tl.min(sound, 0) == 1) & (peak != float("-inf")), token, -1)


@triton.jit
def drawn(
    row,  # [vocab_size] fp32 probabilities
    vocab_size,
    peak,  # fp32, the highest of them
    top_k,
    top_p,
    min_p,
    point,  # fp64 in [0, 1)
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token at `point` of the mass that min-p, top-k and top-p leave, tokens in order of falling probability."""
    high = peak.to(tl.int32, bitcast=True)
    low = (min_p * peak).to(tl.int32, bitcast=True)
    masses, counts = at_or_above(row, vocab_size, low + tl.arange(0, WAYS) * 0, WAYS, TILE)
    mass, count = entry(masses, 0, WAYS), entry(counts, 0, WAYS)
    # What is left is everything above some probability and the first `ties` tokens of just that one; how many
    # tokens come before these says which probability is meant.
    kept_mass, before, ties = mass, count * 0 - 1, count
    if (top_k > 0) & (top_k < count):
        low, mass, count, _, mass_above, before = search(
            row, vocab_size, low, mass, count, high, top_k.to(tl.float64), COUNT_AT_LEAST, WAYS, TILE
        )
        ties = top_k - before
        kept_mass = mass_above + (mass - mass_above) * ties.to(tl.float64) / (count - before).to(tl.float64)
    if top_p < 1.0:
        goal = top_p * kept_mass
        low, mass, count, _, mass_above, count_above = search(
            row, vocab_size, low, mass, count, high, goal, MASS_AT_LEAST, WAYS, TILE
        )
        each = (mass - mass_above) / (count - count_above).to(tl.float64)
        # All that have less than the goal before them: the one that crosses it is still in.
        wanted = tl.ceil((goal - mass_above) / each).to(tl.int32)
        most = tl.where(count_above == before, ties, count - count_above)
        before, ties = count_above, tl.minimum(tl.maximum(wanted, 1), most)
        kept_mass = mass_above + each * ties.to(tl.float64)
    goal = point * kept_mass
    low, mass, count, high, mass_above, count_above = search(
        row, vocab_size, low, mass, count, high, goal, MASS_OVER, WAYS, TILE
    )
    each = (mass - mass_above) / (count - count_above).to(tl.float64)
    rank = tl.floor((goal - mass_above) / each).to(tl.int32)
    most = tl.where(count_above == before, ties, count - count_above)
    rank = tl.minimum(tl.maximum(rank, 0), most - 1)
    return nth_token(row, vocab_size, low, high, rank, TILE)


@triton.jit
def sample_rows(
    logits,  # [num_rows, vocab_size] fp32
    probabilities,  # [num_rows, vocab_size] fp32, at each row's temperature
    temperatures,  # [num_rows] fp32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] fp64
    min_ps,  # [num_rows] fp32
    seeds,  # [num_rows] int64
    positions,  # [num_rows] int64
    tokens,  # [num_rows] int64
    vocab_size,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_rows,): one token."""
    row = tl.program_id(0)
    offset = row.to(tl.int64) * vocab_size
    token = argmax(logits + offset, vocab_size, TILE)
    if (token >= 0) & (tl.load(temperatures + row) > 0.0):
        peak = tl.load(probabilities + offset + token)
        if peak == peak:
            token = drawn(
                probabilities + offset,
                vocab_size,
                peak,
                tl.load(top_ks + row),
                tl.load(top_ps + row),
                tl.load(min_ps + row),
                philox_uniform(tl.load(seeds + row), tl.load(positions + row)),
                WAYS,
                TILE,
            )
        else:
            token = -1
    tl.store(tokens + row, token.to(tl.int64))
