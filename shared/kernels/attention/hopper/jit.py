"""Prefill attention for Hopper in Gluon: TMA, a producer warp, two consumer warpgroups that take turns.

After FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608). The producer brings keys and values in boxes of one block,
[BLOCK_SIZE, HEAD_DIM], into a ring of stages. Each consumer has 64 of the tile's 128 rows. It issues the scores of the
next keys before the softmax of the present ones, so that matrix units and exponentials overlap; the turns make one
consumer's softmax fall into the other's products.

It has been compiled, never run: no Hopper device was at hand.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# mypy: disable-error-code="unused-ignore, attr-defined, assignment, misc"
# ruff: noqa: N803, N806  # compile-time arguments are upper case

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shared.kernels.attention.prefill.schedule_jit import FIRST_TOKEN, KV_LEN, QUERY_LEN, SEQ, TILE_INDEX, WIDTH

ROWS = gl.constexpr(64)  # of one consumer

# Triton 3.7 renamed it; 3.6 has the old name alone.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def tile_range(items, TOKENS: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """(position of the tile's first query, KV tiles to skip, KV tiles to stop before)."""
    item = items + gl.program_id(1) * WIDTH
    query_len, kv_len = gl.load(item + QUERY_LEN), gl.load(item + KV_LEN)
    first = kv_len - query_len + gl.load(item + TILE_INDEX) * TOKENS
    last = gl.minimum(first + TOKENS, kv_len) - 1
    begin = kv_len * 0
    if WINDOW > 0:
        begin = gl.maximum(first - WINDOW + 1, 0) // TILE
    return first, begin, last // TILE + 1


@gluon.jit
def produce(
    pool,
    block_tables,
    items,
    k_ring,
    v_ring,
    k_full,
    k_empty,
    v_full,
    v_empty,
    layer,
    num_layers,
    table_stride,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    TILE: gl.constexpr,
    TOKENS: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """One warp: bring the tiles of keys and values, each as soon as both consumers have left its stage."""
    BOXES: gl.constexpr = TILE // BLOCK_SIZE
    head_rows = gl.num_programs(0) * BLOCK_SIZE  # rows of the pool from K to V of one layer
    block_rows = num_layers * 2 * head_rows  # from block to block
    key_row = layer * 2 * head_rows + gl.program_id(0) * BLOCK_SIZE
    value_row = key_row + head_rows
    item = items + gl.program_id(1) * WIDTH
    _, begin, end = tile_range(items, TOKENS, TILE, WINDOW)
    last_block = (gl.load(item + KV_LEN) - 1) // BLOCK_SIZE
    table = block_tables + gl.load(item + SEQ).to(gl.int64) * table_stride
    for tile in range(begin, end):
        turn = tile - begin
        stage = turn % STAGES
        empty_phase = (turn // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), empty_phase)
        mbarrier.expect(k_full.index(stage), TILE * k_ring.shape[2] * 2)
        for box in gl.static_range(BOXES):
            # Past the sequence's end its last block stands in: consumers hide those keys.
            block = gl.load(table + gl.minimum(tile * BOXES + box, last_block))
            target = k_ring.index(stage).slice(box * BLOCK_SIZE, BLOCK_SIZE)
            load_box(pool, [block * block_rows + key_row, 0], k_full.index(stage), target)
        mbarrier.wait(v_empty.index(stage), empty_phase)
        mbarrier.expect(v_full.index(stage), TILE * v_ring.shape[2] * 2)
        for box in gl.static_range(BOXES):
            block = gl.load(table + gl.minimum(tile * BOXES + box, last_block))
            target = v_ring.index(stage).slice(box * BLOCK_SIZE, BLOCK_SIZE)
            load_box(pool, [block * block_rows + value_row, 0], v_full.index(stage), target)


@gluon.jit
def hide_unseen(scores, query_positions, start, whole_end, SCORES: gl.constexpr, WINDOW: gl.constexpr):
    """[ROWS, TILE] fp32 with -inf where a key is not seen; positions below `whole_end` are seen by every query.

    No real query comes after the sequence's end, so causality hides the keys past it too.
    """
    TILE: gl.constexpr = scores.shape[1]
    if WINDOW > 0 or start + TILE > whole_end:
        positions = start + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
        seen = positions[None, :] <= query_positions[:, None]
        if WINDOW > 0:
            seen = seen & (positions[None, :] > query_positions[:, None] - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def soften(scores, peak, total, log2_scale):
    """One step of online softmax in base 2: (weights [ROWS, TILE] fp32, new peak, new total, decay), no product."""
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak) * log2_scale
    weights = gl.exp2(scores * log2_scale - shift[:, None])
    decay = gl.exp2(peak * log2_scale - shift)
    return weights, new_peak, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def clear_past_end(v_tile, start, kv_len, BLOCK_SIZE: gl.constexpr, BLOCKED: gl.constexpr):
    """Zero the values past kv_len: memory there may hold NaN, and a weight of zero would not hide it.

    Both consumers write the same bytes.
    """
    TILE: gl.constexpr = v_tile.shape[0]
    for box in gl.static_range(TILE // BLOCK_SIZE):
        if start + (box + 1) * BLOCK_SIZE > kv_len:
            part = v_tile.slice(box * BLOCK_SIZE, BLOCK_SIZE)
            rows = start + box * BLOCK_SIZE + gl.arange(0, BLOCK_SIZE, layout=gl.SliceLayout(1, BLOCKED))
            values = part.load(BLOCKED)
            part.store(gl.where((rows < kv_len)[:, None], values, gl.full_like(values, 0.0)))


@gluon.jit
def own_rows(items, CONSUMER: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """(rows of query and output [ROWS] int64, which of them are real) of a consumer's rows of the tile."""
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    item = items + gl.program_id(1) * WIDTH
    rows = CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    tokens = gl.load(item + TILE_INDEX) * TOKENS + rows // GROUP
    real = (rows < TOKENS * GROUP) & (tokens < gl.load(item + QUERY_LEN))
    heads = gl.program_id(0) * GROUP + rows % GROUP
    return (gl.load(item + FIRST_TOKEN) + tokens).to(gl.int64) * (gl.num_programs(0) * GROUP) + heads, real


@gluon.jit
def consume(
    query,
    output,
    items,
    q_tiles,  # [2, ROWS, HEAD_DIM] shared
    k_ring,
    v_ring,
    k_full,
    k_empty,
    v_full,
    v_empty,
    turns,
    log2_scale,
    CONSUMER: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """One warpgroup: rows 64 * CONSUMER … + 63 of the tile."""
    HEAD_DIM: gl.constexpr = q_tiles.shape[2]
    TILE: gl.constexpr = k_ring.shape[1]
    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HEAD_DIM // 8), HEAD_DIM // 8], [4, 1], [1, 0])

    first, begin, end = tile_range(items, TOKENS, TILE, WINDOW)

    # The queries, once, by plain loads: their rows are not a box.
    places, real = own_rows(items, CONSUMER, GROUP, BLOCKED)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, BLOCKED))
    q_tile = q_tiles.index(CONSUMER)
    q_tile.store(gl.load(query + places[:, None] * HEAD_DIM + dims[None, :], mask=real[:, None], other=0.0))
    fence_async_shared()

    score_rows = CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    query_positions = first + score_rows // GROUP
    whole_end = first + 1  # keys before it are seen by all queries of the tile

    accumulator = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)
    peak = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([ROWS, TILE], gl.float32, SCORES)

    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q_tile, k_ring.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0), count=1)
    count = end - begin
    for turn in range(count - 1):
        stage, phase = turn % STAGES, turn // STAGES & 1
        following, following_phase = (turn + 1) % STAGES, (turn + 1) // STAGES & 1
        start = (begin + turn) * TILE
        mbarrier.wait(k_full.index(following), following_phase)
        # Take turns in issuing products: this consumer's softmax meets the other's.
        mbarrier.wait(turns.index(CONSUMER), turn & 1)
        coming = warpgroup_mma(q_tile, k_ring.index(following).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        scores = hide_unseen(scores, query_positions, start, whole_end, SCORES, WINDOW)
        weights, peak, total, decay = soften(scores, peak, total, log2_scale)
        p = gl.convert_layout(weights.to(k_ring.dtype), WEIGHTS)
        accumulator = accumulator * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
        mbarrier.wait(v_full.index(stage), phase)
        summed = warpgroup_mma(p, v_ring.index(stage), accumulator, is_async=True)
        scores, accumulator = warpgroup_mma_wait(0, deps=[coming, summed])
        mbarrier.arrive(k_empty.index(following), count=1)
        mbarrier.arrive(v_empty.index(stage), count=1)

    turn = count - 1
    stage, phase = turn % STAGES, turn // STAGES & 1
    start = (end - 1) * TILE
    scores = hide_unseen(scores, query_positions, start, whole_end, SCORES, WINDOW)
    weights, peak, total, decay = soften(scores, peak, total, log2_scale)
    p = gl.convert_layout(weights.to(k_ring.dtype), WEIGHTS)
    accumulator = accumulator * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
    mbarrier.wait(v_full.index(stage), phase)
    kv_len = gl.load(items + gl.program_id(1) * WIDTH + KV_LEN)
    if start + TILE > kv_len:
        clear_past_end(v_ring.index(stage), start, kv_len, BLOCK_SIZE, BLOCKED)
        fence_async_shared()
    accumulator = warpgroup_mma(p, v_ring.index(stage), accumulator, is_async=True)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])

    shares = gl.convert_layout(gl.where(total > 0.0, total, 1.0), gl.SliceLayout(1, OUT))
    mean = (accumulator / shares[:, None]).to(output.dtype.element_ty)
    out_places, out_real = own_rows(items, CONSUMER, GROUP, OUT)
    out_dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT))
    gl.store(output + out_places[:, None] * HEAD_DIM + out_dims[None, :], mean, mask=out_real[:, None])


@gluon.jit(do_not_specialize=["block_tables", "items", "layer", "table_stride"])
def prefill_tiles_hopper(
    query,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    pool,  # descriptor: [num_blocks * num_layers * 2 * num_kv_heads * BLOCK_SIZE, HEAD_DIM], boxes of one block
    block_tables,  # [num_seqs, table_stride] int32
    items,  # [num_tiles, WIDTH] int32, see prefill/plan_jit
    output,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    layer,
    num_layers,
    table_stride,
    log2_scale,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (num_kv_heads, num_tiles): 128 // GROUP tokens of one sequence, all query heads of one KV head."""
    SHARED: gl.constexpr = pool.layout
    q_tiles = gl.allocate_shared_memory(pool.dtype, [2, ROWS, HEAD_DIM], SHARED)
    k_ring = gl.allocate_shared_memory(pool.dtype, [STAGES, TILE, HEAD_DIM], SHARED)
    v_ring = gl.allocate_shared_memory(pool.dtype, [STAGES, TILE, HEAD_DIM], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    mbarrier.arrive(turns.index(0), count=1)  # consumer 0 begins

    TOKENS: gl.constexpr = 2 * ROWS // GROUP
    gl.warp_specialize(
        [
            (
                consume,
                (
                    query, output, items, q_tiles, k_ring, v_ring, k_full, k_empty, v_full, v_empty, turns, log2_scale,
                    0, GROUP, BLOCK_SIZE, STAGES, WINDOW,
                ),
            ),
            (
                consume,
                (
                    query, output, items, q_tiles, k_ring, v_ring, k_full, k_empty, v_full, v_empty, turns, log2_scale,
                    1, GROUP, BLOCK_SIZE, STAGES, WINDOW,
                ),
            ),
            (
                produce,
                (
                    pool, block_tables, items, k_ring, v_ring, k_full, k_empty, v_full, v_empty, layer, num_layers,
                    table_stride, BLOCK_SIZE, STAGES, TILE, TOKENS, WINDOW,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
