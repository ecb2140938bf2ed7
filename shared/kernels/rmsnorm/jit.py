"""RMS norm in Triton: one pass, a row stays in registers between its mean and its scaling."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.overlap_jit import await_kernels_before
from shared.kernels.rounding_jit import rounded


@triton.jit
def normalise(x, weight, size, eps, dtype: tl.constexpr):
    """[ROWS, SIZE] fp32 to the same, scaled: zeros past `size` in x; weight: [SIZE] fp32."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / size + eps)
    return rounded(x * scale[:, None], dtype) * weight[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_rows(
    x,  # [num_rows, size]
    residual,  # [num_rows, size], read only if ADDS
    weight,  # [size]
    normed,  # [num_rows, size]
    new_residual,  # [num_rows, size], written only if ADDS
    num_rows,
    size,
    eps,
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,  # a row's mean is taken from it first
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (ceil(num_rows / ROWS),): rows whole, SIZE >= size."""
    await_kernels_before(OVERLAPS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE)
    places = rows.to(tl.int64)[:, None] * size + columns[None, :]
    real = (rows < num_rows)[:, None] & (columns < size)[None, :]
    dtype = normed.dtype.element_ty
    values = tl.load(x + places, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        values = rounded(values + tl.load(residual + places, mask=real, other=0.0).to(tl.float32), dtype)
        tl.store(new_residual + places, values.to(dtype), mask=real)
    if CENTERED:
        values = tl.where(real, values - (tl.sum(values, 1) / size)[:, None], 0.0)
    scales = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32)
    tl.store(normed + places, normalise(values, scales, size, eps, dtype).to(dtype), mask=real)
