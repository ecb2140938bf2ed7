"""Head norm, rotation and KV write in Triton: every element is read once and written once."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.kv_codes_jit import encoded, head_elements
from shared.kernels.overlap_jit import await_kernels_before
from shared.kernels.rounding_jit import rounded


@triton.jit
def load_halves(base, heads, num_heads, head_stride, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """The two halves of some heads of one token: ([HEADS, HALF] fp32, likewise), zeros where there is nothing."""
    columns = tl.arange(0, HALF)
    real = (heads < num_heads)[:, None] & (columns < HEAD_DIM // 2)[None, :]
    pointers = base + heads[:, None] * head_stride + columns[None, :]
    first = tl.load(pointers, mask=real, other=0.0).to(tl.float32)
    return first, tl.load(pointers + HEAD_DIM // 2, mask=real, other=0.0).to(tl.float32)


@triton.jit
def store_halves(base, heads, num_heads, head_stride, first, second, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """The opposite of `load_halves`."""
    columns = tl.arange(0, HALF)
    real = (heads < num_heads)[:, None] & (columns < HEAD_DIM // 2)[None, :]
    pointers = base + heads[:, None] * head_stride + columns[None, :]
    tl.store(pointers, first.to(base.dtype.element_ty), mask=real)
    tl.store(pointers + HEAD_DIM // 2, second.to(base.dtype.element_ty), mask=real)


@triton.jit
def rounded_once(values, pool, dtype: tl.constexpr):
    """fp32 values as they are before codes are made of them; what is stored as it is will be rounded only then."""
    if pool.dtype.element_ty.primitive_bitwidth == 8:
        return rounded(values, dtype)
    return values


@triton.jit
def write_halves(
    pool,
    pool_scales,
    start,  # elements to the first head's run in the token's block
    offset,  # the token's in its block
    heads,
    num_heads,
    first,
    second,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
):
    """The keys or values of some heads of one token, as the pool stores them."""
    of_head = head_elements(pool, BLOCK_SIZE, HEAD_DIM)
    target = pool + start + offset * HEAD_DIM
    if pool_scales is not None:
        peaks = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        poison = tl.sum(first * 0.0, 1) + tl.sum(second * 0.0, 1)
        first, scales = encoded(first, peaks, poison, pool.dtype.element_ty)
        second, _ = encoded(second, peaks, poison, pool.dtype.element_ty)
        places = (start + heads * of_head + BLOCK_SIZE * HEAD_DIM) // 4 + offset
        tl.store(pool_scales + places, scales, mask=heads < num_heads)
    store_halves(target, heads, num_heads, of_head, first, second, HEAD_DIM, HALF)


@triton.jit
def normalise_halves(first, second, weight, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr):
    """RMS norm of each head, rounded as `DecoderOps.rms_norm` rounds; weight: [HEAD_DIM]."""
    columns = tl.arange(0, HALF)
    real = columns < HEAD_DIM // 2
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    low = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    high = tl.load(weight + HEAD_DIM // 2 + columns, mask=real, other=0.0).to(tl.float32)
    first = rounded(rounded(first * scale, dtype) * low[None, :], dtype)
    return first, rounded(rounded(second * scale, dtype) * high[None, :], dtype)


@triton.jit
def rotate_halves(first, second, cos, sin, dtype: tl.constexpr):
    """The pairs (first, second) turned, each product rounded as 16-bit arithmetic rounds it; cos, sin: [1, HALF]."""
    turned = rounded(first * cos, dtype) - rounded(second * sin, dtype)
    return turned, rounded(second * cos, dtype) + rounded(first * sin, dtype)


@triton.jit(do_not_specialize=["layer", "slots"])
def rotate_and_write_heads(
    query,  # [num_tokens, num_heads, HEAD_DIM], strided
    key,  # [num_tokens, num_kv_heads, HEAD_DIM], strided
    value,  # [num_tokens, num_kv_heads, HEAD_DIM], strided
    cos,  # [num_tokens, HEAD_DIM]
    sin,  # [num_tokens, HEAD_DIM]
    q_norm,  # [HEAD_DIM] or None
    k_norm,  # [HEAD_DIM] or None
    placed,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    pool,  # PoolView.elements
    pool_scales,  # PoolView.as_scales
    slots,  # [num_tokens] int64
    layer,
    num_heads,
    num_kv_heads,
    query_stride,  # elements from token to token, as the two below
    key_stride,
    value_stride,
    query_head_stride,
    key_head_stride,
    value_head_stride,
    block_stride,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (num_tokens, ceil(num_heads / HEADS) + ceil(num_kv_heads / HEADS)): some heads of one token."""
    await_kernels_before(OVERLAPS)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_query_parts = (num_heads + HEADS - 1) // HEADS
    dtype = placed.dtype.element_ty
    columns = tl.arange(0, HALF)
    real = columns < HEAD_DIM // 2
    cosines = tl.load(cos + token * HEAD_DIM + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sin + token * HEAD_DIM + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    if part < num_query_parts:
        heads = part * HEADS + tl.arange(0, HEADS)
        base = query + token * query_stride
        first, second = load_halves(base, heads, num_heads, query_head_stride, HEAD_DIM, HALF)
        if q_norm is not None:
            first, second = normalise_halves(first, second, q_norm, eps, HEAD_DIM, HALF, dtype)
        first, second = rotate_halves(first, second, cosines, sines, dtype)
        target = placed + token * num_heads * HEAD_DIM
        store_halves(target, heads, num_heads, HEAD_DIM, first, second, HEAD_DIM, HALF)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            heads = (part - num_query_parts) * HEADS + tl.arange(0, HEADS)
            base = key + token * key_stride
            first, second = load_halves(base, heads, num_kv_heads, key_head_stride, HEAD_DIM, HALF)
            if k_norm is not None:
                first, second = normalise_halves(first, second, k_norm, eps, HEAD_DIM, HALF, dtype)
            first, second = rotate_halves(first, second, cosines, sines, dtype)
            of_head = head_elements(pool, BLOCK_SIZE, HEAD_DIM)
            to_values = tl.cast(num_kv_heads, tl.int64) * of_head  # of one layer
            start = slot // BLOCK_SIZE * block_stride + layer * 2 * to_values
            write_halves(
                pool, pool_scales, start, slot % BLOCK_SIZE, heads, num_kv_heads, rounded_once(first, pool, dtype),
                rounded_once(second, pool, dtype), HEAD_DIM, BLOCK_SIZE, HALF,
            )  # fmt: skip
            base = value + token * value_stride
            first, second = load_halves(base, heads, num_kv_heads, value_head_stride, HEAD_DIM, HALF)
            write_halves(
                pool, pool_scales, start + to_values, slot % BLOCK_SIZE, heads, num_kv_heads, first, second, HEAD_DIM,
                BLOCK_SIZE, HALF,
            )  # fmt: skip
