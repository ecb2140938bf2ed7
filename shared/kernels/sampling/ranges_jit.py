"""Among which weights top-k and top-p end, from the masses and numbers of tokens at or above a few thresholds."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.sampling.weights_jit import KEY_OF_ONE, is_drawn, row_peak

LEVELS = tl.constexpr(8)  # thresholds: 2^-3, 2^-6, … 2^-21, and min-p's
FINE = tl.constexpr(8)  # thresholds within a range that is narrowed
TOTALS = tl.constexpr(16)  # a row's: of the levels, and within the cut's range
WIDEST = tl.constexpr(3 << 23)  # keys between two thresholds: a factor of 8 in weight
MASS_UNITS = tl.constexpr(1 << 40)  # of the likeliest token's mass
COUNT_BITS = tl.constexpr(52)  # from this bit on a total has a number of tokens, below it their mass

FIELDS = tl.constexpr(8)  # a row's: see `place_ranges`
SHARES = tl.constexpr(3)
IS_DRAWN = tl.constexpr(1)
IS_REFINED = tl.constexpr(2)
HAS_CUT = tl.constexpr(4)
IS_BY_COUNT = tl.constexpr(8)


@triton.jit
def level_thresholds(min_p):
    """[LEVELS] int32 keys, falling: none below min-p's, the last just that."""
    levels = tl.arange(0, LEVELS)
    weights = tl.where(levels == LEVELS - 1, 0.0, tl.exp2(-3.0 * (levels + 1).to(tl.float32)))
    return tl.maximum(weights, min_p).to(tl.int32, bitcast=True)


@triton.jit
def fine_thresholds(low, high):
    """[FINE] int32 keys, falling, that cut the range [low, high] from its top; the last is low."""
    ranks = tl.arange(0, FINE)
    step = tl.minimum((high - low) // FINE + 1, WIDEST)
    return tl.where(ranks == FINE - 1, low, tl.maximum(high + 1 - (ranks + 1) * step, low))


@triton.jit
def load_totals(totals, row, first, num_splits, are_there, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """(masses [SIZE] fp64, counts [SIZE] int32, counts [SIZE, SPLITS] int32) of one row from its entry `first` on."""
    splits = tl.arange(0, SPLITS)
    places = (row.to(tl.int64) * TOTALS + first + tl.arange(0, SIZE))[:, None] * num_splits + splits[None, :]
    live = splits < tl.where(are_there, num_splits, 0)
    entries = tl.load(totals + places, mask=live[None, :], other=0)
    counts = ((entries >> COUNT_BITS) & 0xFFF).to(tl.int32)
    masses = entries & ((tl.full([], 1, tl.int64) << COUNT_BITS) - 1)
    return tl.sum(masses, 1).to(tl.float64) * (1.0 / MASS_UNITS), tl.sum(counts, 1), counts


@triton.jit
def at(values, index, SIZE: tl.constexpr):
    """values[index] of a [SIZE] vector; 0 for -1 and past its end."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, values, 0), 0)


@triton.jit
def row_at(values, index, SIZE: tl.constexpr):
    """values[index] of a [SIZE, n] matrix; zeros for -1."""
    return tl.sum(tl.where(tl.arange(0, SIZE)[:, None] == index, values, 0), 0)


@triton.jit
def first_of(reaches, SIZE: tl.constexpr):
    """The index of the first threshold that reaches a goal, if any before the last does: the last."""
    return tl.minimum(tl.sum((reaches == 0).to(tl.int32), 0), SIZE - 1)


@triton.jit
def key_below(thresholds, index, otherwise, SIZE: tl.constexpr):
    """The highest key below thresholds[index]; `otherwise` for -1."""
    return tl.where(index >= 0, at(thresholds, index, SIZE) - 1, otherwise)


@triton.jit
def may_cut(top_k, top_p):
    """Whether a row's settings can leave out tokens that min-p keeps."""
    return (top_k > 0) | (top_p < 1.0)


@triton.jit
def choose_range(
    totals,  # [num_rows, TOTALS, num_splits] int64
    row,
    num_splits,
    min_p,
    top_k,
    top_p,
    refine_over,
    REFINED: tl.constexpr,  # whether the second pass over the thresholds was made where it had to be
    SPLITS: tl.constexpr,
):
    """In which range of keys top-k's and top-p's cuts lie: (is_refined, has_cut, by_count, kept mass, kept number, low
    key, high key, mass above, number above; its tokens [SPLITS]; the highest key of what is to be narrowed of it).

    Top-p cuts in one range. Top-k leaves few tokens, and top-p may then cut anywhere among them: all from its range up
    are one range.
    """
    thresholds = level_thresholds(min_p)
    masses, counts, split_counts = load_totals(totals, row, 0, num_splits, True, LEVELS, SPLITS)
    kept_mass, kept_count = at(masses, LEVELS - 1, LEVELS), at(counts, LEVELS - 1, LEVELS)
    by_count = (top_k > 0) & (top_k < kept_count)
    has_cut = by_count | (top_p < 1.0)
    least = top_p * kept_mass  # that is left; top-k's share is not known, and not asked for
    cut = first_of(tl.where(by_count, counts >= top_k, masses >= least), LEVELS)
    above = tl.where(by_count, -1, cut - 1)

    low, high = at(thresholds, cut, LEVELS), key_below(thresholds, above, KEY_OF_ONE, LEVELS)
    mass, count = at(masses, above, LEVELS), at(counts, above, LEVELS)
    split_ats, split_aboves = row_at(split_counts, cut, LEVELS), row_at(split_counts, above, LEVELS)
    listed = tl.where(has_cut, split_ats - split_aboves, 0)
    is_refined = tl.sum(listed, 0) > refine_over
    fine_high = key_below(thresholds, cut - 1, KEY_OF_ONE, LEVELS)
    if REFINED:  # noqa: SIM102  # which the compiler decides
        if is_refined:
            fine = fine_thresholds(low, fine_high)
            masses, counts, split_counts = load_totals(totals, row, LEVELS, num_splits, True, FINE, SPLITS)
            cut = first_of(tl.where(by_count, counts >= top_k, masses >= least), FINE)
            low = at(fine, cut, FINE)
            split_ats = row_at(split_counts, cut, FINE)
            if (cut > 0) & (by_count == 0):
                high = key_below(fine, cut - 1, KEY_OF_ONE, FINE)
                mass, count = at(masses, cut - 1, FINE), at(counts, cut - 1, FINE)
                split_aboves = row_at(split_counts, cut - 1, FINE)
            listed = split_ats - split_aboves
    return is_refined, has_cut, by_count, kept_mass, kept_count, low, high, mass, count, listed, fine_high


@triton.jit(
    do_not_specialize=[
        "peaks", "peak_tokens", "temperatures", "top_ks", "top_ps", "min_ps", "totals", "fields", "shares", "firsts",
        "num_splits", "refine_over",
    ]
)  # fmt: skip
def place_ranges(
    peaks,  # [num_rows, num_splits] fp32
    peak_tokens,  # [num_rows, num_splits] int32
    temperatures,  # [num_rows] fp32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] fp64
    min_ps,  # [num_rows] fp32
    totals,  # [num_rows, TOTALS, num_splits] int64
    fields,  # [num_rows, FIELDS] int32: 0 of a row that is not drawn, or IS_DRAWN with IS_REFINED, HAS_CUT and
    # IS_BY_COUNT; tokens in the range; tokens kept by min-p; low key, high key and number above of the range; the
    # highest key of what is narrowed of it; the lowest key of the tokens that are in whatever is found in the range
    shares,  # [num_rows, SHARES] fp64: highest logit; masses kept by min-p, and above the range
    firsts,  # [num_rows, num_splits] int32, tokens of the range in the splits before each
    num_splits,
    refine_over,
    REFINED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (num_rows,). Once after the first pass over thresholds, and once, REFINED, after the second."""
    row = tl.program_id(0)
    mine = fields + row * FIELDS
    if REFINED:  # noqa: SIM102  # which the compiler decides
        if (tl.load(mine) & IS_REFINED) == 0:
            return
    peak, token = row_peak(peaks, peak_tokens, row, num_splits, SPLITS)
    if not is_drawn(peak, token, tl.load(temperatures + row)):
        tl.store(mine, 0)
        return
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    least = tl.maximum(min_p, 0.0).to(tl.int32, bitcast=True)
    tl.store(shares + row * SHARES, peak.to(tl.float64))
    if not may_cut(top_k, top_p):
        tl.store(mine, IS_DRAWN)
        tl.store(mine + 7, least)
        return
    is_refined, has_cut, by_count, kept_mass, kept_count, low, high, mass, count, listed, fine_high = choose_range(
        totals, row, num_splits, min_p, top_k, top_p, refine_over, REFINED, SPLITS
    )
    kind = tl.where(is_refined, IS_DRAWN + IS_REFINED, IS_DRAWN)
    tl.store(mine, kind + tl.where(has_cut, HAS_CUT, 0) + tl.where(by_count, IS_BY_COUNT, 0))
    tl.store(mine + 1, tl.sum(listed, 0))
    tl.store(mine + 2, kept_count)
    tl.store(mine + 3, low)
    tl.store(mine + 4, high)
    tl.store(mine + 5, count)
    tl.store(mine + 6, fine_high)
    tl.store(mine + 7, tl.where(has_cut, high + 1, least))
    tl.store(shares + row * SHARES + 1, kept_mass)
    tl.store(shares + row * SHARES + 2, mass)
    splits = tl.arange(0, SPLITS)
    tl.store(firsts + row * num_splits + splits, tl.cumsum(listed, 0) - listed, mask=splits < num_splits)
