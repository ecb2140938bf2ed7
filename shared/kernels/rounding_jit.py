"""Rounding in the middle of an fp32 computation, where the reference rounds."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """fp32 values rounded to `dtype`, as fp32 again.

    One fp32 operation on 16-bit operands, then this, equals the operation in 16 bits, which some devices lack.
    """
    return values.to(dtype).to(tl.float32)
