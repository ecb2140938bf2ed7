"""Counter-based random numbers in Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# compile-time arguments are upper case

import triton
import triton.language as tl


@triton.jit
def philox_uniform(seed, position):
    """fp64 in [0, 1) with 53 random bits: `shared.kernels.sampling.philox.uniform` of two int64 scalars.

    Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011): the seed is the key, the position the counter.
    """
    mask = 0xFFFFFFFF
    key_0, key_1 = seed.to(tl.uint64) & mask, (seed.to(tl.uint64) >> 32) & mask
    c_0, c_1 = position.to(tl.uint64) & mask, (position.to(tl.uint64) >> 32) & mask
    c_2, c_3 = c_0 & 0, c_0 & 0
    for _ in tl.static_range(10):
        first, second = c_0 * 0xD2511F53, c_2 * 0xCD9E8D57
        c_0, c_1, c_2, c_3 = (
            (second >> 32) ^ c_1 ^ key_0,
            second & mask,
            (first >> 32) ^ c_3 ^ key_1,
            first & mask,
        )
        key_0 = (key_0 + 0x9E3779B9) & mask
        key_1 = (key_1 + 0xBB67AE85) & mask
    bits = (c_0 << 21) | (c_1 >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53
