"""What surrounds cuDNN's attention in Triton: keys and values out of the pool, and the joining of a chunk's parts."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table", "layer", "block_stride", "first", "end"])
def gather_rows(
    pool,  # elements of a pool of two planes
    table,  # [max_blocks] int32, a sequence's blocks
    rows,  # [2, HEADS, num_rows, HEAD_DIM], filled: keys, then values
    layer,
    block_stride,  # elements
    first,  # position of row 0
    end,  # rows of this position and later are zeros
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (2 * HEADS, num_rows / TILE): some positions of one head."""
    head = tl.program_id(0)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    position = first + row
    dims = tl.arange(0, DIMS)
    inside = (position < end)[:, None] & (dims < HEAD_DIM)[None, :]
    block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0).to(tl.int64)
    run = (layer * 2 * HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
    source = pool + (block * block_stride + run * HEAD_DIM)[:, None] + dims[None, :]
    values = tl.load(source, mask=inside, other=0.0)
    place = (head * tl.num_programs(1) * TILE + row).to(tl.int64) * HEAD_DIM
    tl.store(rows + place[:, None] + dims[None, :], values, mask=(dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["first_row", "part_first", "num_rows", "sums_stride", "part_stride"])
def join_part(
    output,  # [any, HEADS, HEAD_DIM]
    sums,  # [HEADS, sums_stride] fp32: logarithms of the sums of what `output` holds
    part,  # [part_stride, HEADS, HEAD_DIM]
    part_sums,  # [HEADS, part_stride] fp32
    first_row,  # of sums; output is that of row 0
    part_first,  # of part
    sums_stride,
    part_stride,
    IS_FIRST: tl.constexpr,  # nothing is held yet
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Grid (num_rows, ceil(HEADS / HEAD_TILE)): some heads of a token, each part by its share of the sum."""
    row = first_row + tl.program_id(0)
    part_row = part_first + tl.program_id(0)
    heads = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    dims = tl.arange(0, DIMS)
    real = heads < HEADS
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    columns = heads[:, None] * HEAD_DIM + dims[None, :]
    places = output + row.to(tl.int64) * HEADS * HEAD_DIM + columns
    mean = tl.load(part + part_row.to(tl.int64) * HEADS * HEAD_DIM + columns, mask=inside, other=0.0)
    total = tl.load(part_sums + heads * part_stride + part_row, mask=real, other=0.0)
    if not IS_FIRST:
        before = tl.load(sums + heads * sums_stride + row, mask=real, other=0.0)
        peak = tl.maximum(before, total)
        weight = tl.exp(before - peak)
        part_weight = tl.exp(total - peak)
        total = peak + tl.log(weight + part_weight)
        share = (part_weight / (weight + part_weight))[:, None]
        held = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        mean = held * (1 - share) + mean.to(tl.float32) * share
    tl.store(places, mean.to(output.dtype.element_ty), mask=inside)
    tl.store(sums + heads * sums_stride + row, total, mask=real)
