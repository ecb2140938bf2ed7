"""Prefill attention in Triton: tiles of queries against their own sequence's paged keys.

FlashAttention-2 (Dao 2023, arXiv:2307.08691). The query heads that share a KV head lie side by side in one tile's
rows, so short chunks still fill it and the causal edge is finer than the tile.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, N806  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.attention.jit import (
    absorb,
    begun_with_sinks,
    capped_with_factor,
    first_seen,
    load_rows,
    normalised,
    read_positions,
    slot_offsets,
)
from shared.kernels.attention.prefill.schedule_jit import FIRST_TOKEN, KV_LEN, QUERY_LEN, SEQ, TILE_INDEX, WIDTH
from shared.kernels.kv_codes_jit import head_elements, load_scales, opened


@triton.jit
def attend_tiles(
    accumulator,  # [ROWS, DIMS] fp32
    peak,  # [ROWS] fp32
    total,  # [ROWS] fp32
    q,  # [ROWS, DIMS]
    query_positions,  # [ROWS] int32
    pool,
    scales,
    run,  # elements to this layer's and head's row 0 of K in block 0
    to_values,  # and from there to V's
    table,  # [max_blocks] int32
    first,  # first position that some query sees
    begin,  # first position of the tiles, a multiple of TILE
    end,  # position to stop before
    kv_len,
    block_stride,
    log2_scale,
    CAP: tl.constexpr,  # bound of a score to powers of 2, 0 for none
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    WHOLE: tl.constexpr,  # every key of these tiles is seen by every query
):
    """Absorb the keys from begin to end into (accumulator, peak, total)."""
    columns = tl.arange(0, TILE)
    # Worked out a turn ahead: a load that waits for its table entry in the same turn is not fetched ahead in full.
    read = read_positions(begin + columns, first, WINDOW)
    offsets = slot_offsets(table, read, kv_len, block_stride, BLOCK_SIZE, HEAD_DIM)
    for start in range(begin, end, TILE):
        positions = start + columns
        read = read_positions(positions, first, WINDOW)
        # KV may be kept in fewer bits than the query has.
        k = opened(load_rows(pool + run, offsets, read, kv_len, HEAD_DIM, DIMS, WHOLE), q.dtype)
        v = opened(load_rows(pool + run + to_values, offsets, read, kv_len, HEAD_DIM, DIMS, WHOLE), q.dtype)
        if scales is not None:
            k_scales = load_scales(scales, run, offsets, read, kv_len, BLOCK_SIZE, HEAD_DIM)
            v_scales = load_scales(scales, run + to_values, offsets, read, kv_len, BLOCK_SIZE, HEAD_DIM)
        offsets = slot_offsets(table, positions + TILE, kv_len, block_stride, BLOCK_SIZE, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if scales is not None:
            scores *= k_scales[None, :]
        scores, factor = capped_with_factor(scores, log2_scale, CAP)
        if not WHOLE:
            # Positions past kv_len are hidden too, though a padding row would come after them.
            seen = (positions[None, :] <= query_positions[:, None]) & (positions < kv_len)[None, :]
            if WINDOW > 0:
                seen &= positions[None, :] >= first_seen(query_positions, WINDOW, CHUNKED)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        if scales is not None:
            accumulator, peak, total = absorb(accumulator, peak, total, scores, factor, v, v_scales)
        else:
            accumulator, peak, total = absorb(accumulator, peak, total, scores, factor, v, None)
    return accumulator, peak, total


@triton.jit(do_not_specialize=["block_tables", "items", "layer", "table_stride"])
def prefill_tiles(
    query,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    pool,  # PoolView.elements
    scales,  # PoolView.as_scales
    block_tables,  # [num_seqs, table_stride] int32
    items,  # [num_tiles, WIDTH] int32, see schedule_jit
    output,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    layer,
    table_stride,
    block_stride,
    log2_scale,
    sinks,  # [num_kv_heads * GROUP] fp32 or None
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAP: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    UNIFORM: tl.constexpr,  # one loop for all tiles of keys: where there are several, they may round differently
):
    """Grid (num_kv_heads, num_tiles): ROWS // GROUP tokens of one sequence, all query heads of one KV head."""
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    item = items + tl.program_id(1) * WIDTH
    seq, tile = tl.load(item + SEQ), tl.load(item + TILE_INDEX)
    first_token, query_len, kv_len = tl.load(item + FIRST_TOKEN), tl.load(item + QUERY_LEN), tl.load(item + KV_LEN)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    tokens = tile * TOKENS + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    real = ((rows < TOKENS * GROUP) & (tokens < query_len))[:, None] & (dims < HEAD_DIM)[None, :]
    places = (first_token + tokens).to(tl.int64) * (num_kv_heads * GROUP) + heads
    places = places[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + places, mask=real, other=0.0)
    query_positions = kv_len - query_len + tokens
    first_position = kv_len - query_len + tile * TOKENS
    last_position = tl.minimum(first_position + TOKENS, kv_len) - 1

    of_head = head_elements(pool, BLOCK_SIZE, HEAD_DIM)
    to_values = tl.cast(num_kv_heads, tl.int64) * of_head  # of one layer
    run = layer * 2 * to_values + kv_head * of_head
    table = block_tables + seq.to(tl.int64) * table_stride
    accumulator = tl.zeros([ROWS, DIMS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        peak, total = begun_with_sinks(sinks, heads, rows < TOKENS * GROUP)

    # Keys in order: those that only the first queries' window reaches, those that all see, the causal edge.
    begin = kv_len * 0
    first = kv_len * 0
    whole_end = (first_position + 1) // TILE * TILE
    if WINDOW > 0:
        first = first_seen(first_position, WINDOW, CHUNKED)
        begin = first // TILE * TILE
    if UNIFORM:
        whole_end = begin
    elif WINDOW > 0:
        whole_begin = (first_seen(last_position, WINDOW, CHUNKED) + TILE - 1) // TILE * TILE
        edge_end = tl.minimum(whole_begin, last_position + 1)
        accumulator, peak, total = attend_tiles(
            accumulator, peak, total, q, query_positions, pool, scales, run, to_values, table, first, begin, edge_end,
            kv_len, block_stride, log2_scale, CAP, HEAD_DIM, BLOCK_SIZE, DIMS, TILE, WINDOW, CHUNKED, False,
        )  # fmt: skip
        begin = whole_begin
        whole_end = tl.maximum(whole_end, whole_begin)
    if not UNIFORM:
        accumulator, peak, total = attend_tiles(
            accumulator, peak, total, q, query_positions, pool, scales, run, to_values, table, first, begin,
            whole_end, kv_len, block_stride, log2_scale, CAP, HEAD_DIM, BLOCK_SIZE, DIMS, TILE, WINDOW, CHUNKED, True,
        )  # fmt: skip
    accumulator, peak, total = attend_tiles(
        accumulator, peak, total, q, query_positions, pool, scales, run, to_values, table, first,
        whole_end, last_position + 1, kv_len, block_stride, log2_scale, CAP, HEAD_DIM, BLOCK_SIZE, DIMS, TILE, WINDOW,
        CHUNKED, False,
    )  # fmt: skip
    tl.store(output + places, normalised(accumulator, total).to(output.dtype.element_ty), mask=real)
