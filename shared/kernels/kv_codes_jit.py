"""Keys and values in codes of 8 bits, in Triton: how they lie in a pool, and how they are made and opened.

Codes of fp8 are opened by hand: not every device knows the format, and not all mean the same by it.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl


@triton.jit
def head_elements(pool, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Elements of a pool from one head's run to the next: its rows, and behind codes their scales."""
    if pool.dtype.element_ty.primitive_bitwidth == 8:
        return BLOCK_SIZE * (HEAD_DIM + 4)
    return BLOCK_SIZE * HEAD_DIM


@triton.jit
def opened(elements, dtype: tl.constexpr):
    """What is stored, as `dtype`: numbers, or codes without their scales. Codes of fp8 are uint8."""
    if elements.dtype == tl.uint8:
        bits = elements.to(tl.uint32)
        moved = ((bits & 128) << 24) | ((bits & 127) << 20)
        # The number over 2^120, subnormal ones too; any `dtype` has it exactly.
        return (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    if elements.dtype == tl.int8:
        return elements.to(tl.float32).to(dtype)
    return elements.to(dtype)


@triton.jit
def load_scales(
    scales,  # a pool of codes as fp32
    run,  # bytes from its beginning to the head's run in block 0
    offsets,  # [TILE] int64, see slot_offsets
    positions,  # [TILE] int32
    kv_len,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """[TILE] fp32, the scales of rows, 0 past kv_len."""
    slots = positions % BLOCK_SIZE
    places = (run + offsets - slots * HEAD_DIM + BLOCK_SIZE * HEAD_DIM) // 4 + slots
    return tl.load(scales + places, mask=positions < kv_len, other=0.0)


@triton.jit
def encoded(values, peaks, poison, stored: tl.constexpr):
    """Codes and scales of rows, as `encode` in pool_view.py.

    values: [ROWS, DIMS] fp32; peaks: [ROWS], the largest |value|; poison: [ROWS], 0, or NaN where a value is NaN or
    infinite; stored: int8, or uint8 for fp8.
    """
    most = 448.0 if stored == tl.uint8 else 127.0
    is_usual = (poison == 0.0) & (peaks >= 7.888609052210118e-31)
    divisor = tl.where(is_usual, peaks, 1.0)
    factors = tl.where(is_usual, tl.div_rn(divisor * 0.0 + most, divisor), 0.0)
    scales = poison + tl.where(is_usual, tl.div_rn(divisor, divisor * 0.0 + most), 0.0)
    scaled = tl.where(is_usual[:, None], values * factors[:, None], 0.0)
    if stored == tl.int8:
        # 1.5 · 2^23: a small number added to it is rounded to a whole one, even at ties.
        codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    else:  # one return: the compiler wants one type of all that it reads
        bits = scaled.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        small = (tl.abs(scaled) * 512.0 + 12582912.0).to(tl.uint32, bitcast=True)  # below 2^-6 steps are of 2^-9
        code = tl.where(tl.abs(scaled) < 0.015625, small, normal)
        codes = ((code & 127) | ((bits >> 24) & 128)).to(tl.uint8)
    return codes, scales
