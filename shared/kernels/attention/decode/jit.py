"""Decode attention in Triton: parts of every sequence side by side; the last part of a sequence to end merges them.

Flash-decoding (Dao et al. 2023) over the work items of `schedule_jit`: all parts of a launch are about equally long,
whatever the mix of lengths. The query heads of a group fill the rows of one matrix tile, so each key is read once for
all of them. In a step that checks guesses so do the few tokens of a sequence's query.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.attention.decode.schedule_jit import (
    BEGIN,
    END,
    FIRST_SLOT,
    KV_LEN,
    NUM_PARTS,
    QUERY_LEN,
    SEQ,
    TOKEN,
    WIDTH,
)
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
from shared.kernels.kv_codes_jit import head_elements, load_scales, opened
from shared.kernels.overlap_jit import await_kernels_before


@triton.jit
def merge_parts(
    part_means,  # [num_slots, QUERIES, num_heads, HEAD_DIM] fp32
    part_peaks,  # [num_slots, QUERIES, num_heads] fp32
    output,  # [num_tokens, num_heads, HEAD_DIM]
    token,
    first_head,
    end_head,
    num_heads,
    first_slot,
    num_parts,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    QUERIES: tl.constexpr = 1,
):
    """Join the parts of one sequence for the heads from `first_head` on, HEADS of them but none from `end_head` on,
    CHUNK parts at once: one head after another would wait for memory twice each. The heads of a query's next token
    count on from those of the one before."""
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    heads = first_head + tl.arange(0, HEADS)
    is_head = heads < end_head
    accumulator = tl.zeros([HEADS, DIMS], tl.float32)
    first = first_slot.to(tl.int64) * (num_heads * QUERIES) + heads
    peak = tl.load(part_peaks + first, mask=is_head, other=0.0)
    total = peak * 0.0
    if QUERIES > 1:  # a token may see nothing of a part
        total = tl.zeros([HEADS], tl.float32)
    for start in range(0, num_parts, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        real = is_head[:, None] & (chunk < num_parts)[None, :]
        slot_heads = (first_slot + chunk).to(tl.int64)[None, :] * (num_heads * QUERIES) + heads[:, None]
        peaks = tl.load(part_peaks + slot_heads, mask=real, other=float("-inf"))
        means = tl.load(
            part_means + slot_heads[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=real[:, :, None] & is_dim[None, None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(peaks, 1))
        shift = new_peak
        if QUERIES > 1:
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(peaks - shift[:, None])
        decay = tl.exp2(peak - shift)
        accumulator = accumulator * decay[:, None] + tl.sum(means * weights[:, :, None], 1)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
    places = output + (token.to(tl.int64) * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
    mean = accumulator / tl.where(is_head, total, 1.0)[:, None]
    tl.store(places, mean.to(output.dtype.element_ty), mask=is_head[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["block_tables", "items", "tickets", "part_means", "part_peaks", "layer", "table_stride"])
def decode_parts(
    query,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    pool,  # PoolView.elements
    scales,  # PoolView.as_scales
    block_tables,  # [num_seqs, table_stride] int32
    items,  # [num_slots, WIDTH] int32, see schedule_jit
    tickets,  # [num_seqs, num_kv_heads] int32, all 0 before and after
    output,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    part_means,  # [num_slots, QUERIES, num_kv_heads * GROUP, HEAD_DIM] fp32, of the sequences with several parts
    part_peaks,  # [num_slots, QUERIES, num_kv_heads * GROUP] fp32, base-2 log of the softmax's denominator
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
    CAP: tl.constexpr,  # bound of a score to powers of 2, 0 for none
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,  # heads that the merge reads at once
    CHUNK: tl.constexpr,  # parts of each
    QUERIES: tl.constexpr,  # most tokens of a query
    OVERLAPS: tl.constexpr,
):
    """Grid (num_kv_heads, num_slots): one part of one sequence for one KV head and the query heads that share it."""
    await_kernels_before(OVERLAPS)
    kv_head, slot = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    item = items + slot * WIDTH
    seq = tl.load(item + SEQ)
    if seq < 0:
        return
    token, kv_len = tl.load(item + TOKEN), tl.load(item + KV_LEN)
    begin, end = tl.load(item + BEGIN), tl.load(item + END)
    num_parts = tl.load(item + NUM_PARTS)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    # Counted from the first token's head 0; the heads of the next token follow.
    heads = kv_head * GROUP + rows
    num_rows = GROUP
    if QUERIES > 1:
        query_len = tl.load(item + QUERY_LEN)
        token_heads = kv_head * GROUP + rows % GROUP
        heads = rows // GROUP * (num_kv_heads * GROUP) + token_heads
        num_rows = query_len * GROUP
        newest = kv_len - query_len + rows // GROUP  # the position that each row is at
    real = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    places = (token.to(tl.int64) * num_kv_heads * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + places, mask=real, other=0.0)

    of_head = head_elements(pool, BLOCK_SIZE, HEAD_DIM)
    to_values = tl.cast(num_kv_heads, tl.int64) * of_head  # of one layer
    run = layer * 2 * to_values + kv_head * of_head
    keys = pool + run
    table = block_tables + seq.to(tl.int64) * table_stride
    accumulator = tl.zeros([ROWS, DIMS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:  # the first part of a sequence has seen its sink
        is_first = slot == tl.load(item + FIRST_SLOT)
        sink_heads = heads
        if QUERIES > 1:
            sink_heads = token_heads
        sink_peak, sink_total = begun_with_sinks(sinks, sink_heads, rows < num_rows)
        peak, total = tl.where(is_first, sink_peak, peak), tl.where(is_first, sink_total, total)
    columns = tl.arange(0, TILE)
    oldest = kv_len - 1  # the position of the query's first token
    if QUERIES > 1:
        oldest = kv_len - query_len
    first = kv_len * 0
    if WINDOW > 0:
        first = first_seen(oldest, WINDOW, CHUNKED)
    # Worked out a turn ahead: a load that waits for its table entry in the same turn is not fetched ahead in full.
    read = read_positions(begin * TILE + columns, first, WINDOW)
    offsets = slot_offsets(table, read, kv_len, block_stride, BLOCK_SIZE, HEAD_DIM)
    for tile in range(begin, end):
        positions = tile * TILE + columns
        read = read_positions(positions, first, WINDOW)
        # KV may be kept in fewer bits than the query has.
        k = opened(load_rows(keys, offsets, read, kv_len, HEAD_DIM, DIMS, False), q.dtype)
        v = opened(load_rows(keys + to_values, offsets, read, kv_len, HEAD_DIM, DIMS, False), q.dtype)
        if scales is not None:
            k_scales = load_scales(scales, run, offsets, read, kv_len, BLOCK_SIZE, HEAD_DIM)
            v_scales = load_scales(scales, run + to_values, offsets, read, kv_len, BLOCK_SIZE, HEAD_DIM)
        offsets = slot_offsets(table, positions + TILE, kv_len, block_stride, BLOCK_SIZE, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if scales is not None:
            scores *= k_scales[None, :]
        scores, factor = capped_with_factor(scores, log2_scale, CAP)
        if QUERIES == 1:
            seen = positions < kv_len
            if WINDOW > 0:
                seen &= positions >= first
            scores = tl.where(seen[None, :], scores, float("-inf"))
        else:
            seen_by_row = positions[None, :] <= newest[:, None]
            if WINDOW > 0:
                seen_by_row &= positions[None, :] >= first_seen(newest, WINDOW, CHUNKED)[:, None]
            scores = tl.where(seen_by_row, scores, float("-inf"))
        if scales is not None:
            accumulator, peak, total = absorb(accumulator, peak, total, scores, factor, v, v_scales)
        else:
            accumulator, peak, total = absorb(accumulator, peak, total, scores, factor, v, None)

    mean = normalised(accumulator, total)
    if num_parts == 1:
        tl.store(output + places, mean.to(output.dtype.element_ty), mask=real)
    else:
        slot_heads = slot.to(tl.int64) * num_kv_heads * (GROUP * QUERIES) + heads
        tl.store(part_means + slot_heads[:, None] * HEAD_DIM + dims[None, :], mean, mask=real)
        tl.store(part_peaks + slot_heads, peak + tl.log2(total), mask=rows < num_rows)
        # The barrier orders all threads' stores before the ticket's release; the last ticket's program acquires them.
        tl.debug_barrier()
        ticket = tickets + seq * num_kv_heads + kv_head
        if tl.atomic_add(ticket, 1, sem="acq_rel") == num_parts - 1:
            tl.store(ticket, 0)
            first_slot = tl.load(item + FIRST_SLOT)
            end_head = (kv_head + 1) * GROUP
            if QUERIES == 1:
                for head in tl.static_range(0, GROUP, HEADS):
                    merge_parts(
                        part_means, part_peaks, output, token, kv_head * GROUP + head, end_head, num_kv_heads * GROUP,
                        first_slot, num_parts, HEAD_DIM, DIMS, HEADS, CHUNK,
                    )  # fmt: skip
            else:
                for before in range(0, query_len * num_kv_heads * GROUP, num_kv_heads * GROUP):
                    for head in tl.static_range(0, GROUP, HEADS):
                        merge_parts(
                            part_means, part_peaks, output, token, before + kv_head * GROUP + head, before + end_head,
                            num_kv_heads * GROUP, first_slot, num_parts, HEAD_DIM, DIMS, HEADS, CHUNK, QUERIES,
                        )  # fmt: skip
