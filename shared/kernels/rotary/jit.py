"""Head norm, rotation and KV write in Triton: every element is read once and written once."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

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
    kv_blocks,  # [num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
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
):
    """Grid (num_tokens, ceil(num_heads / HEADS) + ceil(num_kv_heads / HEADS)): some heads of one token."""
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
            head_rows = num_kv_heads.to(tl.int64) * BLOCK_SIZE * HEAD_DIM  # elements from K to V of one layer
            target = kv_blocks + slot // BLOCK_SIZE * block_stride + layer * 2 * head_rows
            target += slot % BLOCK_SIZE * HEAD_DIM
            head_stride = BLOCK_SIZE * HEAD_DIM
            store_halves(target, heads, num_kv_heads, head_stride, first, second, HEAD_DIM, HALF)
            base = value + token * value_stride
            first, second = load_halves(base, heads, num_kv_heads, value_head_stride, HEAD_DIM, HALF)
            store_halves(target + head_rows, heads, num_kv_heads, head_stride, first, second, HEAD_DIM, HALF)
