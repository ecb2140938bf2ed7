"""A layer's experts in Triton: rows sorted by expert, one launch for the products of all experts that have rows.

A program multiplies a tile of one expert's rows by a tile of its weight, so experts without rows are not read.
Which expert a tile belongs to is worked out on the device.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.activation.jit import activated
from shared.kernels.rounding_jit import rounded


@triton.jit
def expert_of(tile, row_ends, tile_ends, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a tile; NUM_EXPERTS and nothing more for one past the last."""
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(tile_ends + experts, mask=experts < NUM_EXPERTS, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    rows = tl.load(row_ends + experts, mask=experts < NUM_EXPERTS, other=0)
    before = experts == expert - 1
    tiles_before, rows_before = tl.sum(tl.where(before, ends, 0), 0), tl.sum(tl.where(before, rows, 0), 0)
    end = tl.sum(tl.where(experts == expert, rows, 0), 0)
    return expert, rows_before + (tile - tiles_before) * ROWS, end


@triton.jit(do_not_specialize=["order", "row_ends", "tile_ends"])
def gate_up_tiles(
    x,  # [num_tokens, hidden]
    weight,  # [NUM_EXPERTS, 2 * inner, hidden], gate first
    order,  # [num_tokens * TOP_K] int64: row of the sorted pairs → pair
    row_ends,  # [NUM_EXPERTS] int32
    tile_ends,  # [NUM_EXPERTS] int32
    output,  # [num_tokens * TOP_K, inner], sorted
    hidden,
    inner,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid (column tiles of `inner`, row tiles): x gate^T and x up^T, activated, for the rows of one expert."""
    expert, first, end = expert_of(tl.program_id(1), row_ends, tile_ends, NUM_EXPERTS, EXPERTS, ROWS)
    if expert == NUM_EXPERTS:
        return
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    tokens = tl.load(order + rows, mask=rows < end, other=0) // TOP_K
    x_rows = x + tokens.to(tl.int64)[:, None] * hidden
    gates = weight + (expert.to(tl.int64) * 2 * inner + columns)[:, None] * hidden
    real_rows, real_columns = (rows < end)[:, None], (columns < inner)[:, None]
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, hidden, DEPTH):
        k = start + depths
        inside = (k < hidden)[None, :]
        a = tl.load(x_rows + k[None, :], mask=real_rows & inside, other=0.0)
        g = tl.load(gates + k[None, :], mask=real_columns & inside, other=0.0)
        u = tl.load(gates + tl.cast(inner, tl.int64) * hidden + k[None, :], mask=real_columns & inside, other=0.0)
        gate = tl.dot(a, tl.trans(g), gate, input_precision="ieee")
        up = tl.dot(a, tl.trans(u), up, input_precision="ieee")
    dtype = output.dtype.element_ty
    found = activated(rounded(gate, dtype), rounded(up, dtype), dtype, GATE, ALPHA, LIMIT)
    places = rows.to(tl.int64)[:, None] * inner + columns[None, :]
    tl.store(output + places, found.to(dtype), mask=real_rows & (columns < inner)[None, :])


@triton.jit(do_not_specialize=["order", "row_ends", "tile_ends"])
def down_tiles(
    x,  # [num_tokens * TOP_K, inner], sorted
    weight,  # [NUM_EXPERTS, hidden, inner]
    order,  # as above
    row_ends,
    tile_ends,
    output,  # [num_tokens * TOP_K, hidden], pair by pair; pairs of other experts are left alone
    inner,
    hidden,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid (column tiles of `hidden`, row tiles): x weight^T for the rows of one expert, put where their pairs lie."""
    expert, first, end = expert_of(tl.program_id(1), row_ends, tile_ends, NUM_EXPERTS, EXPERTS, ROWS)
    if expert == NUM_EXPERTS:
        return
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    x_rows = x + rows.to(tl.int64)[:, None] * inner
    w_rows = weight + (expert.to(tl.int64) * hidden + columns)[:, None] * inner
    real_rows = (rows < end)[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, DEPTH):
        k = start + depths
        inside = (k < inner)[None, :]
        a = tl.load(x_rows + k[None, :], mask=real_rows & inside, other=0.0)
        b = tl.load(w_rows + k[None, :], mask=(columns < hidden)[:, None] & inside, other=0.0)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    pairs = tl.load(order + rows, mask=rows < end, other=0).to(tl.int64)
    places = pairs[:, None] * hidden + columns[None, :]
    tl.store(output + places, sums.to(output.dtype.element_ty), mask=real_rows & (columns < hidden)[None, :])


@triton.jit
def combine_tiles(
    found,  # [num_tokens * TOP_K, hidden]
    local_ids,  # [num_tokens, TOP_K] int64, NUM_EXPERTS for pairs of other experts
    weights,  # [num_tokens, TOP_K] fp32
    output,  # [num_tokens, hidden]
    hidden,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (tiles of `hidden`, num_tokens): what a token's experts gave times their weights, in the order of choice."""
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = columns < hidden
    total = tl.zeros([TILE], tl.float32)
    for place in range(TOP_K):
        pair = token * TOP_K + place
        is_local = tl.load(local_ids + pair) < NUM_EXPERTS
        values = tl.load(found + pair * hidden + columns, mask=real, other=0.0).to(tl.float32)
        total += tl.where(is_local, values * tl.load(weights + pair), 0.0)  # what lies there may be NaN
    tl.store(output + token * hidden + columns, total.to(output.dtype.element_ty), mask=real)
