"""Codes of weights opened in registers: two words at a time by PTX, or by plain operations where that is not known.

A word of 16 bits has four codes of int4 or two of 8 bits. A code minus its zero is a whole number of at most nine bits,
or an fp8 number: exact in 16 bits. PTX builds it from bits, with one rounded operation on two at a time, since
conversions would take longer than reading the codes does.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl

from shared.kernels.kv_codes_jit import opened

# Each takes two words in $1 and gives two numbers in $0. A code under the last bits of 128.0 in bf16, or of 1024.0 in
# fp16, is that number plus the code; $2 has minus that number, and the zero.
_NIBBLE = """{
.reg .b32 found, one;
mov.b32 one, ONE;
shr.b32 found, $1, SHIFT;
lop3.b32 found, found, 0x000F000F, MAGIC, 0xEA;
fma.rn.TYPE $0, found, one, $2;
}"""
# The sign of a byte in two's complement makes 128.0 to 256.0: what is taken off.
_BYTE_BF16 = """{
.reg .b32 found, less, one;
mov.b32 one, 0x3F803F80;
shr.b32 found, $1, SHIFT;
lop3.b32 less, found, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 found, found, 0x007F007F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, found, one, less;
}"""
_BYTE_FP16 = """{
.reg .b32 found, less, one;
mov.b32 one, 0x3C003C00;
mov.b32 less, 0xE480E480;
shr.b32 found, $1, SHIFT;
lop3.b32 found, found, 0x00FF00FF, 0x64806480, 0x6A;
fma.rn.f16x2 $0, found, one, less;
}"""
# The bits of an fp8 number in the place of a wider one's stand for the number over a power of two.
_FLOAT = """{
.reg .b32 found, sign, factor, zero;
mov.b32 factor, FACTOR;
mov.b32 zero, 0x80008000;
shl.b32 found, $1, SHIFT;
and.b32 sign, found, 0x80008000;
shr.b32 found, found, PLACES;
lop3.b32 found, found, MASK, sign, 0xEA;
fma.rn.TYPE $0, found, factor, zero;
}"""


def _texts(text: str, *shifts: int, **words: str) -> tl.constexpr:
    """For each part of a word, which its shift brings down."""
    for word, value in words.items():
        text = text.replace(word, value)
    return tl.constexpr(tuple(text.replace("SHIFT", str(shift)) for shift in shifts))


_BF16 = {"ONE": "0x3F803F80", "MAGIC": "0x43004300", "TYPE": "bf16x2"}
_FP16 = {"ONE": "0x3C003C00", "MAGIC": "0x64006400", "TYPE": "f16x2"}
_FLOAT_BF16 = {"FACTOR": "0x7B807B80", "PLACES": "4", "MASK": "0x07F007F0", "TYPE": "bf16x2"}  # 2^120
_FLOAT_FP16 = {"FACTOR": "0x5C005C00", "PLACES": "1", "MASK": "0x3F803F80", "TYPE": "f16x2"}  # 2^8
NIBBLES_BF16 = _texts(_NIBBLE, 0, 4, 8, 12, **_BF16)
NIBBLES_FP16 = _texts(_NIBBLE, 0, 4, 8, 12, **_FP16)
BYTES_BF16 = _texts(_BYTE_BF16, 0, 8)
BYTES_FP16 = _texts(_BYTE_FP16, 0, 8)
FLOATS_BF16 = _texts(_FLOAT, 8, 0, **_FLOAT_BF16)
FLOATS_FP16 = _texts(_FLOAT, 8, 0, **_FLOAT_FP16)


@triton.jit
def opened_codes(words, zeros, dtype: tl.constexpr, KIND: tl.constexpr, PART: tl.constexpr, PTX: tl.constexpr):
    """[COLUMNS, WORDS] of `dtype`: the code of one part in each word, minus its zero.

    words: [COLUMNS, WORDS] uint16; zeros: [COLUMNS] fp32, or None but for int4.
    """
    if not PTX:
        if KIND == "int4":
            codes = (words >> (4 * PART)) & 15
            found = (codes.to(tl.float32) - zeros[:, None]).to(dtype)
        else:
            codes = ((words >> (8 * PART)) & 255).to(tl.uint8)
            whole = codes.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
            found = opened(codes, dtype) if KIND == "fp8" else whole
    elif dtype == tl.bfloat16:
        if KIND == "int4":
            less = (-128.0 - zeros).to(dtype)[:, None]
            nibble: tl.constexpr = NIBBLES_BF16[PART]
            found = tl.inline_asm_elementwise(nibble, "=r,r,r", [words, less], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            byte: tl.constexpr = FLOATS_BF16[PART] if KIND == "fp8" else BYTES_BF16[PART]
            found = tl.inline_asm_elementwise(byte, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        if KIND == "int4":
            less = (-1024.0 - zeros).to(dtype)[:, None]
            half_nibble: tl.constexpr = NIBBLES_FP16[PART]
            found = tl.inline_asm_elementwise(
                half_nibble, "=r,r,r", [words, less], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            half_byte: tl.constexpr = FLOATS_FP16[PART] if KIND == "fp8" else BYTES_FP16[PART]
            found = tl.inline_asm_elementwise(half_byte, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    if KIND == "int8" and zeros is not None:
        found = (found.to(tl.float32) - zeros[:, None]).to(dtype)
    return found
