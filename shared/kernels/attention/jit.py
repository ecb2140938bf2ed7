"""What the two attention kernels share: reading paged tiles, online softmax."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl


@triton.jit
def slot_offsets(
    table,  # [max_blocks] int32, one sequence's block ids
    positions,  # [TILE] int32
    kv_len,
    block_stride,  # elements from block to block
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """[TILE] int64: where each position's row lies, counted from its head's row 0 in block 0.

    64 bits, because a pool passes 2^31 elements. Past kv_len the table may hold anything: block 0 stands in.
    """
    block_ids = tl.load(table + positions // BLOCK_SIZE, mask=positions < kv_len, other=0)
    return block_ids.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def read_positions(positions, first, WINDOW: tl.constexpr):
    """[TILE] int32: the positions of a tile to read; `first`, which some query sees, in place of those before it.

    What those hold is not read, because a table may have holes in front of a window, and memory there may hold NaN.
    """
    if WINDOW > 0:
        positions = tl.maximum(positions, first)
    return positions


@triton.jit
def load_rows(base, offsets, positions, kv_len, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, WHOLE: tl.constexpr):
    """[TILE, DIMS] rows of K or V; zeros past kv_len (not where the tile is WHOLE) and past HEAD_DIM.

    Zeros, because memory there may hold NaN, and a weight of zero would not hide it.
    """
    dims = tl.arange(0, DIMS)
    pointers = base + offsets[:, None] + dims[None, :]
    if WHOLE and HEAD_DIM == DIMS:
        return tl.load(pointers)
    if WHOLE:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM == DIMS:
        return tl.load(pointers, mask=(positions < kv_len)[:, None], other=0.0)
    return tl.load(pointers, mask=(positions < kv_len)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def first_seen(positions, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first position that a query at each position sees: of its window, or of its chunk of WINDOW tokens."""
    first = tl.maximum(positions - WINDOW + 1, 0)
    if CHUNKED:
        first = tl.maximum(positions, 0) // WINDOW * WINDOW
    return first


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP · tanh(score / CAP), fp32; the scores themselves where CAP is 0."""
    if CAP > 0:
        fading = tl.exp2(tl.abs(scores / CAP) * -2.8853900817779268)  # e^(-2 |score / CAP|)
        bound = (1.0 - fading) / (1.0 + fading) * CAP
        scores = tl.where(scores < 0, -bound, bound)
    return scores


@triton.jit
def capped_with_factor(scores, log2_scale, CAP: tl.constexpr):
    """(scores, the factor that they are yet to be multiplied by), for `absorb`: a cap is of scores with it."""
    if CAP > 0:
        return capped(scores * log2_scale, CAP), log2_scale * 0.0 + 1.0
    return scores, log2_scale


@triton.jit
def begun_with_sinks(sinks, heads, real):
    """(peak, total), both [ROWS] fp32, of rows that have seen their head's sink alone, or one of 0."""
    peak = tl.load(sinks + heads, mask=real, other=0.0) * 1.4426950408889634
    return peak, peak * 0.0 + 1.0


@triton.jit
def absorb(accumulator, peak, total, scores, factor, values, value_scales):
    """One step of online softmax, in base 2 (Milakov and Gimelshein 2018, arXiv:1805.02867).

    accumulator: [ROWS, DIMS] fp32, Σ 2^(score - peak) · value so far; peak, total: [ROWS] fp32;
    scores: [ROWS, TILE] fp32, -inf where unseen, yet to be multiplied by `factor`, a positive scalar that joins the
    exponent's subtraction; values: [TILE, DIMS];
    value_scales: [TILE] fp32, by which values are yet to be multiplied, or None.
    A row that has seen nothing yet keeps peak = -inf and total = 0, without NaN.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * factor - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    if value_scales is not None:
        weights *= value_scales[None, :]
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator * decay[:, None], input_precision="ieee")
    return accumulator, new_peak, total


@triton.jit
def normalised(accumulator, total):
    """[ROWS, DIMS]: the weighted mean; zeros for a row that saw nothing."""
    return accumulator / tl.where(total > 0.0, total, 1.0)[:, None]
