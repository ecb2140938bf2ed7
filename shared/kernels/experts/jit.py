"""A layer's experts in Triton: rows sorted by expert, one launch for the products of all experts that have rows.

A program multiplies a tile of one expert's rows by a tile of its weight, so experts without rows are not read.
Which expert a tile belongs to is worked out on the device.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.activation.jit import activated
from shared.kernels.matmul.jit import loaded, tiles_of
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


@triton.jit(do_not_specialize=["order", "row_ends", "tile_ends", "num_row_tiles"])
def gate_up_tiles(
    x,  # [num_tokens, hidden]
    weight,  # [NUM_EXPERTS, 2 * inner, hidden], gate first
    order,  # [num_tokens * TOP_K] int64: row of the sorted pairs → pair
    row_ends,  # [NUM_EXPERTS] int32
    tile_ends,  # [NUM_EXPERTS] int32
    output,  # [num_tokens * TOP_K, inner], sorted
    hidden,
    inner,
    num_row_tiles,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,  # whether DEPTH divides `hidden`
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid (row tiles * column tiles of `inner`,): x gate^T and x up^T, activated, for the rows of one expert.

    What lies past its last row or column is computed from the last one, and not stored.
    """
    row_tile, column_tile = tiles_of(tl.program_id(0), num_row_tiles, tl.cdiv(inner, COLUMNS), GROUP)
    expert, first, end = expert_of(row_tile, row_ends, tile_ends, NUM_EXPERTS, EXPERTS, ROWS)
    if expert == NUM_EXPERTS:
        return
    rows = first + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    tokens = tl.load(order + tl.minimum(rows, end - 1)) // TOP_K
    x_rows = x + tokens.to(tl.int64)[:, None] * hidden
    gates = weight + (expert.to(tl.int64) * 2 * inner + tl.minimum(columns, inner - 1))[:, None] * hidden
    ups = gates + tl.cast(inner, tl.int64) * hidden
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, hidden, DEPTH):
        a = loaded(x_rows, start + depths, hidden, EVEN)
        g = loaded(gates, start + depths, hidden, EVEN)
        u = loaded(ups, start + depths, hidden, EVEN)
        gate = tl.dot(a, tl.trans(g), gate, input_precision="ieee")
        up = tl.dot(a, tl.trans(u), up, input_precision="ieee")
    dtype = output.dtype.element_ty
    found = activated(rounded(gate, dtype), rounded(up, dtype), dtype, GATE, ALPHA, LIMIT)
    places = rows.to(tl.int64)[:, None] * inner + columns[None, :]
    tl.store(output + places, found.to(dtype), mask=(rows < end)[:, None] & (columns < inner)[None, :])


@triton.jit(do_not_specialize=["order", "row_ends", "tile_ends", "num_row_tiles"])
def down_tiles(
    x,  # [num_tokens * TOP_K, inner], sorted
    weight,  # [NUM_EXPERTS, hidden, inner]
    order,  # as above
    row_ends,
    tile_ends,
    output,  # [num_tokens * TOP_K, hidden], pair by pair; pairs of other experts are left alone
    inner,
    hidden,
    num_row_tiles,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,  # whether DEPTH divides `inner`
):
    """Grid (row tiles * column tiles of `hidden`,): x weight^T for an expert's rows, put where their pairs lie."""
    row_tile, column_tile = tiles_of(tl.program_id(0), num_row_tiles, tl.cdiv(hidden, COLUMNS), GROUP)
    expert, first, end = expert_of(row_tile, row_ends, tile_ends, NUM_EXPERTS, EXPERTS, ROWS)
    if expert == NUM_EXPERTS:
        return
    rows = first + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    x_rows = x + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * inner
    w_rows = weight + (expert.to(tl.int64) * hidden + tl.minimum(columns, hidden - 1))[:, None] * inner
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, DEPTH):
        a = loaded(x_rows, start + depths, inner, EVEN)
        b = loaded(w_rows, start + depths, inner, EVEN)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    pairs = tl.load(order + rows, mask=rows < end, other=0).to(tl.int64)
    places = pairs[:, None] * hidden + columns[None, :]
    tl.store(
        output + places, sums.to(output.dtype.element_ty), mask=(rows < end)[:, None] & (columns < hidden)[None, :]
    )


@triton.jit
def combine_tiles(
    found,  # [num_tokens * TOP_K, hidden]
    rows,  # [num_tokens * TOP_K] int64: the row of `found` of each pair; None: pair by pair
    local_ids,  # [num_tokens, TOP_K] int64, NUM_EXPERTS for pairs of other experts
    weights,  # [num_tokens, TOP_K] fp32
    output,  # [num_tokens, hidden]
    hidden,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_tokens, tiles of `hidden`): what a token's experts gave times their weights, in the order of choice."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = columns < hidden
    total = tl.zeros([TILE], tl.float32)
    for place in range(TOP_K):
        pair = token * TOP_K + place
        is_local = tl.load(local_ids + pair) < NUM_EXPERTS
        row = pair
        if rows is not None:
            row = tl.load(rows + pair)
        values = tl.load(found + row * hidden + columns, mask=real, other=0.0).to(tl.float32)
        total += tl.where(is_local, values * tl.load(weights + pair), 0.0)  # what lies there may be NaN
    tl.store(output + token * hidden + columns, total.to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["first_expert", "num_pairs"])
def sort_pairs_here(
    expert_ids,  # [num_pairs] int64
    local_ids,  # [num_pairs] int64: of this range's experts, NUM_EXPERTS for others
    order,  # [num_pairs] int64: sorted row → pair
    row_ends,  # [NUM_EXPERTS] int32
    tile_ends,  # [NUM_EXPERTS] int32
    first_expert,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # a power of two, more than NUM_EXPERTS
    ROWS: tl.constexpr,  # of a tile
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (ceil(num_pairs / BLOCK),): the place of each pair among those sorted by expert, equal ones as they come, by
    comparing it with all others; the first program also counts each expert's."""
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = local_of(expert_ids, block, first_expert, num_pairs, NUM_EXPERTS)
    places = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        others = start + tl.arange(0, CHUNK)
        ids = local_of(expert_ids, others, first_expert, num_pairs, NUM_EXPERTS)
        is_before = (ids[None, :] < own[:, None]) | (
            (ids[None, :] == own[:, None]) & (others[None, :] < block[:, None])
        )
        places += tl.sum(is_before.to(tl.int32), 1)
    tl.store(local_ids + block, own.to(tl.int64), mask=block < num_pairs)
    tl.store(order + places, block.to(tl.int64), mask=block < num_pairs)
    if tl.program_id(0) == 0:
        counts = tl.zeros([BINS], tl.int32)
        for start in range(0, num_pairs, CHUNK):
            ids = local_of(expert_ids, start + tl.arange(0, CHUNK), first_expert, num_pairs, NUM_EXPERTS)
            counts += tl.histogram(ids, BINS)
        experts = tl.arange(0, BINS)
        counts = tl.where(experts < NUM_EXPERTS, counts, 0)
        tl.store(row_ends + experts, tl.cumsum(counts, 0), mask=experts < NUM_EXPERTS)
        tl.store(tile_ends + experts, tl.cumsum((counts + ROWS - 1) // ROWS, 0), mask=experts < NUM_EXPERTS)


@triton.jit
def local_of(expert_ids, pairs, first_expert, num_pairs, NUM_EXPERTS: tl.constexpr):
    """int32: the pairs' experts, counted in their range; NUM_EXPERTS for others', and past the last pair."""
    ids = tl.load(expert_ids + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32)
    local = ids - first_expert
    return tl.where((ids >= 0) & (local >= 0) & (local < NUM_EXPERTS), local, NUM_EXPERTS)
