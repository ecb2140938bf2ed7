"""A product of few rows with a 16-bit weight in Triton, as fast as the weight can be read.

The weight is the left operand, whose rows fill the matrix instructions that few rows of x would leave empty. The work
is cut so that all programs run at once and end together; what a split of k has summed is added up by the last to end.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.overlap_jit import await_kernels_before

LINE = tl.constexpr(64)
"""Elements of 16 bits of a line of the level 2 cache."""


@triton.jit
def fetch_ahead(w_rows, begin, DEPTH: tl.constexpr):
    """Has the level 2 cache fetch [COLUMNS, DEPTH] of the weight, which no kernel before writes."""
    lines = w_rows + begin + tl.arange(0, DEPTH // LINE)[None, :] * LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows", "steps", "num_splits", "steps_a_split", "tickets"])
def multiply_few(
    x,  # [num_rows, in_size]
    weight,  # [out_size, in_size], both sizes multiples of tiles
    bias,  # [out_size] or None
    output,  # [num_rows, out_size]
    parts,  # [out tiles, num_splits, COLUMNS, ROWS] fp32
    tickets,  # [out tiles] int32, all 0 before and after
    num_rows,
    in_size,
    out_size,
    steps,  # of DEPTH, of all of k
    num_splits,
    steps_a_split,
    ROWS: tl.constexpr,  # >= num_rows
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (out tiles * splits,): x weight^T + bias, summed in fp32, splits in their order."""
    tile, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    columns, rows, depths = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS), tl.arange(0, DEPTH)
    begin = split * steps_a_split
    w_rows = weight + columns.to(tl.int64)[:, None] * in_size
    if OVERLAPS:
        fetch_ahead(w_rows, begin * DEPTH, DEPTH)
    await_kernels_before(OVERLAPS)
    real = (rows < num_rows)[:, None]
    x_rows = x + rows[:, None] * in_size
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in tl.range(begin, tl.minimum(begin + steps_a_split, steps), num_stages=STAGES):
        k = (step * DEPTH + depths)[None, :]
        total = tl.dot(tl.load(w_rows + k), tl.trans(tl.load(x_rows + k, mask=real, other=0.0)), total)

    places = rows[None, :] * out_size + columns[:, None]
    is_row = (rows < num_rows)[None, :]
    if num_splits > 1:
        within = tl.arange(0, COLUMNS)[:, None] * ROWS + rows[None, :]
        tl.store(parts + tl.program_id(0) * (COLUMNS * ROWS) + within, total)
        # The barrier orders all threads' stores before the ticket's release; the last ticket's program acquires them.
        tl.debug_barrier()
        if tl.atomic_add(tickets + tile, 1, sem="acq_rel") != num_splits - 1:
            return
        tl.store(tickets + tile, 0)
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for part in range(num_splits):
            total += tl.load(parts + (tile * num_splits + part) * (COLUMNS * ROWS) + within)
    if bias is not None:
        total += tl.load(bias + columns).to(tl.float32)[:, None]
    tl.store(output + places, total.to(output.dtype.element_ty), mask=is_row)
