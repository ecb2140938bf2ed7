"""A matrix product in Triton whose every row depends on that row alone, to the bit.

A program's tile may be of any size: each of its sums runs over k in steps of DEPTH, by one kind of instruction.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl


@triton.jit
def tiles_of(program, num_row_tiles, num_column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: GROUP row tiles after each other share a column tile, so that what runs at
    the same time reads few weights and few rows."""
    of_group = GROUP * num_column_tiles
    first = program // of_group * GROUP
    rows = tl.minimum(num_row_tiles - first, GROUP)
    return first + program % of_group % rows, program % of_group // rows


@triton.jit
def loaded(pointers, k, size, EVEN: tl.constexpr):
    """[…, DEPTH] of the columns k; zeros past `size`, which DEPTH divides if EVEN."""
    if EVEN:
        return tl.load(pointers + k[None, :])
    return tl.load(pointers + k[None, :], mask=(k < size)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_tiles(
    x,  # [num_rows, in_size]
    weight,  # [out_size, in_size]
    bias,  # [out_size] or None
    output,  # [num_rows, out_size]
    num_rows,
    in_size,
    out_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,  # whether DEPTH divides `in_size`
):
    """Grid (row tiles * out tiles,): x weight^T + bias, k in steps of DEPTH in rising order, summed in fp32.

    What lies past the last row or column is computed from the last one, and not stored.
    """
    row_tile, column_tile = tiles_of(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.cdiv(out_size, COLUMNS), GROUP)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    x_rows = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * in_size
    w_rows = weight + tl.minimum(columns, out_size - 1).to(tl.int64)[:, None] * in_size
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, in_size, DEPTH):
        a = loaded(x_rows, start + depths, in_size, EVEN)
        b = loaded(w_rows, start + depths, in_size, EVEN)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + columns, mask=columns < out_size, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * out_size + columns[None, :]
    real = (rows < num_rows)[:, None] & (columns < out_size)[None, :]
    tl.store(output + places, sums.to(output.dtype.element_ty), mask=real)
