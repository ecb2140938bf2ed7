"""Decode attention in Triton: parts of every sequence side by side, then a merge.

Flash-decoding (Dao et al. 2023) with a schedule worked out on the device: all parts of a launch are about equally
long whatever the mix of lengths, and the grid depends on the batch size alone, so that a captured CUDA graph
stays right while sequences grow. The query heads of a group fill the rows of one matrix tile, so each key is read
once for all of them.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.attention.jit import absorb, find_sequence, load_rows, normalised, query_lens, slot_offsets


@triton.jit
def plan_parts(
    query_start,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    num_seqs,
    num_items,  # parts to aim at, beyond one for each sequence
    SEQS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 where there is none
):
    """For each sequence, [SEQS] int32: (its parts, tiles of each of them, the first tile that its query sees).

    Sequences with another number of query tokens than one have no part; one without keys (a row that pads a
    captured batch) has one part of no tiles. There are at most `num_items + num_seqs` parts in all.
    """
    rows = tl.arange(0, SEQS)
    single = query_lens(query_start, num_seqs, SEQS) == 1
    lens = tl.load(seq_lens + rows, mask=rows < num_seqs, other=0)
    first = lens * 0
    if WINDOW > 0:
        first = tl.maximum(lens - WINDOW, 0) // TILE
    tiles = tl.where(single, (lens + TILE - 1) // TILE - first, 0)
    longest = tl.maximum((tl.sum(tiles, 0) + num_items - 1) // num_items, MIN_TILES)
    # Equal parts rather than long ones and a rest.
    parts = tl.maximum((tiles + longest - 1) // longest, 1)
    part_tiles = tl.maximum((tiles + parts - 1) // parts, 1)
    parts = tl.maximum((tiles + part_tiles - 1) // part_tiles, 1)
    return tl.where(single, parts, 0), part_tiles, first


@triton.jit(do_not_specialize=["layer", "num_seqs", "num_items"])
def decode_parts(
    query,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    kv_blocks,  # [num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    block_tables,  # [num_seqs, table_stride] int32
    query_start,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    output,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    part_means,  # [num_slots, num_kv_heads * GROUP, HEAD_DIM] fp32, of the sequences with several parts
    part_peaks,  # [num_slots, num_kv_heads * GROUP] fp32, base-2 log of the softmax's denominator
    layer,
    num_seqs,
    num_items,
    table_stride,
    block_stride,
    log2_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Grid (num_kv_heads, num_slots): one part of one sequence for one KV head and the query heads that share it."""
    kv_head, slot = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    parts, part_tiles, first = plan_parts(query_start, seq_lens, num_seqs, num_items, SEQS, TILE, MIN_TILES, WINDOW)
    seq, part = find_sequence(parts, slot)
    if seq >= num_seqs:
        return
    mine = tl.arange(0, SEQS) == seq
    num_parts = tl.sum(tl.where(mine, parts, 0), 0)
    num_tiles = tl.sum(tl.where(mine, part_tiles, 0), 0)
    kv_len = tl.load(seq_lens + seq)
    begin = tl.sum(tl.where(mine, first, 0), 0) + part * num_tiles
    end = tl.minimum(begin + num_tiles, (kv_len + TILE - 1) // TILE)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    heads = kv_head * GROUP + rows
    real = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    token = tl.load(query_start + seq).to(tl.int64)
    places = (token * num_kv_heads * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + places, mask=real, other=0.0)

    head_rows = num_kv_heads.to(tl.int64) * BLOCK_SIZE * HEAD_DIM  # elements from K to V of one layer
    keys = kv_blocks + layer * 2 * head_rows + kv_head * BLOCK_SIZE * HEAD_DIM
    table = block_tables + seq.to(tl.int64) * table_stride
    accumulator = tl.zeros([ROWS, DIMS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    columns = tl.arange(0, TILE)
    # Worked out a turn ahead: a load that waits for its table entry in the same turn is not fetched ahead in full.
    offsets = slot_offsets(table, begin * TILE + columns, kv_len, block_stride, BLOCK_SIZE, HEAD_DIM)
    for tile in range(begin, end):
        positions = tile * TILE + columns
        # KV may be kept in fewer bits than the query has.
        k = load_rows(keys, offsets, positions, kv_len, HEAD_DIM, DIMS, False).to(q.dtype)
        v = load_rows(keys + head_rows, offsets, positions, kv_len, HEAD_DIM, DIMS, False).to(q.dtype)
        offsets = slot_offsets(table, positions + TILE, kv_len, block_stride, BLOCK_SIZE, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
        seen = positions < kv_len
        if WINDOW > 0:
            seen &= positions >= kv_len - WINDOW
        scores = tl.where(seen[None, :], scores, float("-inf"))
        accumulator, peak, total = absorb(accumulator, peak, total, scores, v)

    mean = normalised(accumulator, total)
    if num_parts == 1:
        tl.store(output + places, mean.to(output.dtype.element_ty), mask=real)
    else:
        slot_heads = slot.to(tl.int64) * num_kv_heads * GROUP + heads
        tl.store(part_means + slot_heads[:, None] * HEAD_DIM + dims[None, :], mean, mask=real)
        tl.store(part_peaks + slot_heads, peak + tl.log2(total), mask=rows < GROUP)


@triton.jit(do_not_specialize=["num_seqs", "num_items"])
def merge_parts(
    part_means,  # [num_slots, num_heads, HEAD_DIM] fp32
    part_peaks,  # [num_slots, num_heads] fp32
    query_start,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    output,  # [num_tokens, num_heads, HEAD_DIM]
    num_seqs,
    num_items,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (num_heads, num_seqs): joins the parts of one head of one sequence; nothing to do where there is one."""
    head, seq = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    parts, _, _ = plan_parts(query_start, seq_lens, num_seqs, num_items, SEQS, TILE, MIN_TILES, WINDOW)
    num_parts = tl.sum(tl.where(tl.arange(0, SEQS) == seq, parts, 0), 0)
    if num_parts <= 1:
        return
    first_slot = tl.sum(tl.where(tl.arange(0, SEQS) < seq, parts, 0), 0)
    dims = tl.arange(0, DIMS)
    accumulator = tl.zeros([DIMS], tl.float32)
    peak = tl.load(part_peaks + first_slot.to(tl.int64) * num_heads + head)
    total = peak * 0.0
    for start in range(0, num_parts, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        real = chunk < num_parts
        slot_heads = (first_slot + chunk).to(tl.int64) * num_heads + head
        peaks = tl.load(part_peaks + slot_heads, mask=real, other=float("-inf"))
        means = tl.load(
            part_means + slot_heads[:, None] * HEAD_DIM + dims[None, :],
            mask=real[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        weights = tl.exp2(peaks - new_peak)
        decay = tl.exp2(peak - new_peak)
        accumulator = accumulator * decay + tl.sum(means * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    token = tl.load(query_start + seq).to(tl.int64)
    place = output + (token * num_heads + head) * HEAD_DIM + dims
    tl.store(place, (accumulator / total).to(output.dtype.element_ty), mask=dims < HEAD_DIM)
