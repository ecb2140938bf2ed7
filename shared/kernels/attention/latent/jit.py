"""Attention of single tokens to latents in Triton: parts of every sequence side by side, as in `decode/jit`.

All query heads see the same rows, and a row is key and value at once: each is read once for a program's ROWS heads.
A row of 512 + 64 elements would fill but half of the next power of two, so it is taken in two pieces, each of which is.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.attention.decode.jit import merge_parts
from shared.kernels.attention.decode.schedule_jit import BEGIN, END, FIRST_SLOT, KV_LEN, NUM_PARTS, SEQ, TOKEN, WIDTH
from shared.kernels.attention.jit import load_rows, slot_offsets


@triton.jit(do_not_specialize=["block_tables", "items", "part_means", "part_peaks", "layer", "table_stride"])
def latent_parts(
    query,  # [num_tokens, NUM_HEADS, DIM]
    pool,  # [num_blocks, num_layers, 1, 1, BLOCK_SIZE * DIM]
    block_tables,  # [num_seqs, table_stride] int32
    items,  # [num_slots, WIDTH] int32, see schedule_jit
    output,  # [num_tokens, NUM_HEADS, DIM]
    part_means,  # [num_slots, NUM_HEADS, DIM] fp32, of the sequences with several parts
    part_peaks,  # [num_slots, NUM_HEADS] fp32, base-2 log of the softmax's denominator
    layer,
    table_stride,
    block_stride,
    log2_scale,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # heads of a program
    FIRST: tl.constexpr,  # elements of a row's first piece, a power of two
    REST: tl.constexpr,  # of the second, at least as many as there are; likewise
    TILE: tl.constexpr,
):
    """Grid (groups of ROWS heads, num_slots): one part of one sequence for some heads."""
    group, slot = tl.program_id(0), tl.program_id(1)
    item = items + slot * WIDTH
    seq = tl.load(item + SEQ)
    if seq < 0:
        return
    token, kv_len = tl.load(item + TOKEN), tl.load(item + KV_LEN)
    begin, end = tl.load(item + BEGIN), tl.load(item + END)
    num_parts = tl.load(item + NUM_PARTS)

    heads = group * ROWS + tl.arange(0, ROWS)
    first, rest = tl.arange(0, FIRST), tl.arange(0, REST)
    # Masks that the compiler sees to be full are none: 128 sums a thread leave few registers for others.
    real = tl.full([ROWS], 1, tl.int1) if NUM_HEADS % ROWS == 0 else heads < NUM_HEADS
    is_rest = tl.full([REST], 1, tl.int1) if DIM - FIRST == REST else rest < DIM - FIRST
    real, real_rest, real_heads = real[:, None], real[:, None] & is_rest[None, :], real
    places = (heads * DIM)[:, None] + first[None, :]
    places_rest = (heads * DIM + FIRST)[:, None] + rest[None, :]
    token_start = token.to(tl.int64) * NUM_HEADS * DIM
    q = tl.load(query + token_start + places, mask=real, other=0.0)
    q_rest = tl.load(query + token_start + places_rest, mask=real_rest, other=0.0)

    rows = pool + layer.to(tl.int64) * BLOCK_SIZE * DIM
    table = block_tables + seq.to(tl.int64) * table_stride
    sums = tl.zeros([ROWS, FIRST], tl.float32)
    sums_rest = tl.zeros([ROWS, REST], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    columns = tl.arange(0, TILE)
    offsets = slot_offsets(table, begin * TILE + columns, kv_len, block_stride, BLOCK_SIZE, DIM)
    for tile in range(begin, end):
        positions = tile * TILE + columns
        k = load_rows(rows, offsets, positions, kv_len, FIRST, FIRST, False).to(q.dtype)
        k_rest = load_rows(rows + FIRST, offsets, positions, kv_len, DIM - FIRST, REST, False).to(q.dtype)
        offsets = slot_offsets(table, positions + TILE, kv_len, block_stride, BLOCK_SIZE, DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = tl.where((positions < kv_len)[None, :], scores, float("-inf"))
        # Online softmax, as `absorb`; a part sees one key at least.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * log2_scale)
        weights = tl.exp2(scores * log2_scale - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(q.dtype)
        sums = tl.dot(weights, k, sums * decay[:, None], input_precision="ieee")
        sums_rest = tl.dot(weights, k_rest, sums_rest * decay[:, None], input_precision="ieee")
        peak = new_peak

    total_or_one = tl.where(total > 0.0, total, 1.0)[:, None]
    mean, mean_rest = sums / total_or_one, sums_rest / total_or_one
    if num_parts == 1:
        tl.store(output + token_start + places, mean.to(output.dtype.element_ty), mask=real)
        tl.store(output + token_start + places_rest, mean_rest.to(output.dtype.element_ty), mask=real_rest)
    else:
        slot_heads = slot.to(tl.int64) * NUM_HEADS
        tl.store(part_means + slot_heads * DIM + places, mean, mask=real)
        tl.store(part_means + slot_heads * DIM + places_rest, mean_rest, mask=real_rest)
        tl.store(part_peaks + slot_heads + heads, peak + tl.log2(total), mask=real_heads)


@triton.jit(do_not_specialize=["items", "part_means", "part_peaks"])
def merge_latents(
    items,  # as above
    part_means,
    part_peaks,
    output,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    DIMS: tl.constexpr,  # a power of two, at least DIM
    CHUNK: tl.constexpr,
):
    """Grid (num_slots, ceil(NUM_HEADS / HEADS)): joins the parts of one sequence, where its first slot is, for some
    heads."""
    slot = tl.program_id(0)
    item = items + slot * WIDTH
    if tl.load(item + SEQ) < 0:
        return
    num_parts = tl.load(item + NUM_PARTS)
    if num_parts == 1 or tl.load(item + FIRST_SLOT) != slot:
        return
    token = tl.load(item + TOKEN)
    first = tl.program_id(1) * HEADS
    merge_parts(
        part_means, part_peaks, output, token, first, NUM_HEADS, NUM_HEADS, slot, num_parts, DIM, DIMS, HEADS, CHUNK
    )
