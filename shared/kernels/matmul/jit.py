"""A matrix product in Triton whose every row depends on that row alone, to the bit: one program size for all."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl


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
):
    """Grid (out tiles, row tiles): x weight^T + bias, k in steps of DEPTH in rising order, summed in fp32."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    x_rows = x + rows.to(tl.int64)[:, None] * in_size
    w_rows = weight + columns.to(tl.int64)[:, None] * in_size
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, in_size, DEPTH):
        k = start + depths
        inside = (k < in_size)[None, :]
        a = tl.load(x_rows + k[None, :], mask=(rows < num_rows)[:, None] & inside, other=0.0)
        b = tl.load(w_rows + k[None, :], mask=(columns < out_size)[:, None] & inside, other=0.0)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + columns, mask=columns < out_size, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * out_size + columns[None, :]
    real = (rows < num_rows)[:, None] & (columns < out_size)[None, :]
    tl.store(output + places, sums.to(output.dtype.element_ty), mask=real)
