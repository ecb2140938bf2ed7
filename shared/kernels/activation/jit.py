"""The gated activation in Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.overlap_jit import await_kernels_before
from shared.kernels.rounding_jit import rounded


@triton.jit
def silu(x):
    """x · sigmoid(x), fp32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def activated(gate, up, dtype: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Gate and up, fp32, as `Activation` says; GATE as in GATES. Rounded as the reference in `dtype` rounds."""
    if GATE == 0:
        return rounded(silu(gate), dtype) * up
    if GATE == 1:  # (1 + tanh(u)) / 2 is the sigmoid of 2u
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return rounded(gate / (1.0 + tl.exp(-inner)), dtype) * up
    gate = tl.minimum(gate, LIMIT)
    up = rounded(tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0, dtype)
    return rounded(gate / (1.0 + tl.exp(-gate * ALPHA)), dtype) * up


@triton.jit
def act_and_mul_tiles(
    gate_up,  # [num_tokens, 2 * size]
    output,  # [num_tokens, size]
    size,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (num_tokens * ceil(size / TILE),): a stretch of one token."""
    await_kernels_before(OVERLAPS)
    num_tiles = (size + TILE - 1) // TILE
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    columns = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    real = columns < size
    dtype = output.dtype.element_ty
    gate = tl.load(gate_up + token * 2 * size + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(output + token * size + columns, activated(gate, up, dtype, GATE, ALPHA, LIMIT).to(dtype), mask=real)
