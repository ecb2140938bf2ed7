"""Which weights can decide each row's choice, from the masses and numbers of tokens at or above a few thresholds."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.sampling.philox_jit import philox_uniform
from shared.kernels.sampling.weights_jit import KEY_OF_ONE, is_drawn, row_peak

LEVELS = tl.constexpr(8)  # thresholds: 2^-3, 2^-6, … 2^-21, and min-p's
FINE = tl.constexpr(8)  # thresholds within a range that is narrowed
TOTALS = tl.constexpr(24)  # a row's: of the levels, within the cut's range, within the draw's
WIDEST = tl.constexpr(3 << 23)  # keys between two thresholds: a factor of 8 in weight
MASS_UNITS = tl.constexpr(1 << 40)  # of the likeliest token's mass
COUNT_BITS = tl.constexpr(52)  # from this bit on a total has a number of tokens, below it their mass

FIELDS = tl.constexpr(16)  # a row's: see `place_ranges`
SHARES = tl.constexpr(4)
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
    """values[index] of a [SIZE] vector; 0 for -1."""
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
def number_in_ranges(cut_high, cut_at, cut_above, draw_low, draw_at, draw_above):
    """Of tokens `in_ranges`, from the numbers of those at or above each range's low end, and above it."""
    meet = draw_low <= cut_high
    together = tl.maximum(cut_at, draw_at) - tl.minimum(cut_above, draw_above)
    return tl.where(meet, together, (cut_at - cut_above) + (draw_at - draw_above))


@triton.jit
def choose_ranges(
    totals,  # [num_rows, TOTALS, num_splits] int64
    row,
    num_splits,
    min_p,
    top_k,
    top_p,
    point,
    refine_over,
    REFINED: tl.constexpr,  # whether the second pass over the thresholds was made where it had to be
    SPLITS: tl.constexpr,
):
    """Which weights can decide the row's choice: (is_refined, has_cut, by_count, kept mass, kept number, and of the
    cut's range and of the draw's: low key, high key, mass above, number above; tokens in either [SPLITS]; the highest
    key of what is to be narrowed of the cut's range).

    Top-p cuts in one range, and leaves a mass between two bounds, which bound the draw. Top-k leaves few tokens, so
    everything from its range up is one range for both. Without them both are the draw's.
    """
    thresholds = level_thresholds(min_p)
    masses, counts, split_counts = load_totals(totals, row, 0, num_splits, True, LEVELS, SPLITS)
    kept_mass, kept_count = at(masses, LEVELS - 1, LEVELS), at(counts, LEVELS - 1, LEVELS)
    by_count = (top_k > 0) & (top_k < kept_count)
    has_cut = by_count | (top_p < 1.0)
    least = top_p * kept_mass  # that is left; top-k's share is not known, and not asked for
    cut = first_of(tl.where(by_count, counts >= top_k, masses >= least), LEVELS)
    most = tl.where(has_cut, at(masses, cut, LEVELS), kept_mass)
    above = first_of(masses > point * least, LEVELS) - 1
    draw = first_of(masses > point * most, LEVELS)
    cut, draw = tl.where(has_cut, cut, draw), tl.where(by_count, cut, draw)
    cut_from = tl.where(has_cut, cut - 1, above)  # the threshold above the cut, whichever kind it is
    cut_above, draw_above = tl.where(by_count, -1, cut_from), tl.where(by_count, -1, above)

    cut_low, cut_high = at(thresholds, cut, LEVELS), key_below(thresholds, cut_above, KEY_OF_ONE, LEVELS)
    cut_mass, cut_count = at(masses, cut_above, LEVELS), at(counts, cut_above, LEVELS)
    draw_low, draw_high = at(thresholds, draw, LEVELS), key_below(thresholds, draw_above, KEY_OF_ONE, LEVELS)
    draw_mass, draw_count = at(masses, draw_above, LEVELS), at(counts, draw_above, LEVELS)
    cut_ats, cut_aboves = row_at(split_counts, cut, LEVELS), row_at(split_counts, cut_above, LEVELS)
    draw_ats, draw_aboves = row_at(split_counts, draw, LEVELS), row_at(split_counts, draw_above, LEVELS)
    listed = number_in_ranges(cut_high, cut_ats, cut_aboves, draw_low, draw_ats, draw_aboves)
    is_refined = tl.sum(listed, 0) > refine_over
    fine_high = key_below(thresholds, cut_from, KEY_OF_ONE, LEVELS)
    if REFINED:  # noqa: SIM102  # which the compiler decides
        if is_refined:
            cuts, draws = fine_thresholds(cut_low, fine_high), fine_thresholds(draw_low, draw_high)
            masses, counts, split_counts = load_totals(totals, row, LEVELS, num_splits, has_cut, FINE, SPLITS)
            cut = first_of(tl.where(by_count, counts >= top_k, masses >= least), FINE)
            most = tl.where(has_cut, at(masses, cut, FINE), kept_mass)
            cut_low, cut_ats = at(cuts, cut, FINE), row_at(split_counts, cut, FINE)
            if (cut > 0) & (by_count == 0):
                cut_high = key_below(cuts, cut - 1, KEY_OF_ONE, FINE)
                cut_mass, cut_count = at(masses, cut - 1, FINE), at(counts, cut - 1, FINE)
                cut_aboves = row_at(split_counts, cut - 1, FINE)

            masses, counts, split_counts = load_totals(
                totals, row, LEVELS + FINE, num_splits, by_count == 0, FINE, SPLITS
            )  # fmt: skip
            above = first_of(masses > point * least, FINE) - 1
            draw = first_of(masses > point * most, FINE)
            draw_low, draw_ats = at(draws, draw, FINE), row_at(split_counts, draw, FINE)
            if above >= 0:
                draw_high = key_below(draws, above, KEY_OF_ONE, FINE)
                draw_mass, draw_count = at(masses, above, FINE), at(counts, above, FINE)
                draw_aboves = row_at(split_counts, above, FINE)
            if by_count:
                draw_low, draw_high, draw_mass, draw_count = cut_low, cut_high, cut_mass, cut_count
                draw_ats, draw_aboves = cut_ats, cut_aboves
            if has_cut == 0:
                cut_low, cut_high, cut_mass, cut_count = draw_low, draw_high, draw_mass, draw_count
                cut_ats, cut_aboves = draw_ats, draw_aboves
            listed = number_in_ranges(cut_high, cut_ats, cut_aboves, draw_low, draw_ats, draw_aboves)
    return (
        is_refined, has_cut, by_count, kept_mass, kept_count, cut_low, cut_high, cut_mass, cut_count,
        draw_low, draw_high, draw_mass, draw_count, listed, fine_high,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "peaks", "peak_tokens", "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions", "totals", "fields",
        "shares", "firsts", "num_splits", "refine_over",
    ]
)  # fmt: skip
def place_ranges(
    peaks,  # [num_rows, num_splits] fp32
    peak_tokens,  # [num_rows, num_splits] int32
    temperatures,  # [num_rows] fp32
    top_ks,  # [num_rows] int32
    top_ps,  # [num_rows] fp64
    min_ps,  # [num_rows] fp32
    seeds,  # [num_rows] int64
    positions,  # [num_rows] int64
    totals,  # [num_rows, TOTALS, num_splits] int64
    fields,  # [num_rows, FIELDS] int32: 0 of a row that is not drawn, or IS_DRAWN with IS_REFINED, HAS_CUT and
    # IS_BY_COUNT; tokens in the ranges; tokens kept by min-p; low key, high key and number above of the cut's range;
    # the same of the draw's; the highest key of what is narrowed of the cut's range
    shares,  # [num_rows, SHARES] fp64: highest logit; masses kept by min-p, above the cut's range, above the draw's
    firsts,  # [num_rows, num_splits] int32, tokens of the ranges in the splits before each
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
    point = philox_uniform(tl.load(seeds + row), tl.load(positions + row))
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    (
        is_refined, has_cut, by_count, kept_mass, kept_count, cut_low, cut_high, cut_mass, cut_count,
        draw_low, draw_high, draw_mass, draw_count, listed, fine_high,
    ) = choose_ranges(totals, row, num_splits, min_p, top_k, top_p, point, refine_over, REFINED, SPLITS)  # fmt: skip
    kind = tl.where(is_refined, IS_DRAWN + IS_REFINED, IS_DRAWN)
    tl.store(mine, kind + tl.where(has_cut, HAS_CUT, 0) + tl.where(by_count, IS_BY_COUNT, 0))
    tl.store(mine + 1, tl.sum(listed, 0))
    tl.store(mine + 2, kept_count)
    tl.store(mine + 3, cut_low)
    tl.store(mine + 4, cut_high)
    tl.store(mine + 5, cut_count)
    tl.store(mine + 6, draw_low)
    tl.store(mine + 7, draw_high)
    tl.store(mine + 8, draw_count)
    tl.store(mine + 9, fine_high)
    tl.store(shares + row * SHARES, peak.to(tl.float64))
    tl.store(shares + row * SHARES + 1, kept_mass)
    tl.store(shares + row * SHARES + 2, cut_mass)
    tl.store(shares + row * SHARES + 3, draw_mass)
    splits = tl.arange(0, SPLITS)
    tl.store(firsts + row * num_splits + splits, tl.cumsum(listed, 0) - listed, mask=splits < num_splits)
