"""The times at which tokens race, in Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# compile-time arguments are upper case

import triton
import triton.language as tl

NEAR = tl.constexpr(0x25800000)  # these as in `reference`
ROOT_HALF_BITS = tl.constexpr(0x3F3504F3)


@triton.jit
def token_words(seed, position, thirds):
    """Four uint32 tensors of random bits for a tensor `thirds` of uint32: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw,
    SC 2011) of the counters (position, third, 0), whose key is the seed. seed, position: int64 scalars."""
    key_0, key_1 = seed.to(tl.uint32), (seed.to(tl.uint64) >> 32).to(tl.uint32)
    c_2 = thirds
    c_0 = thirds * 0 + position.to(tl.uint32)
    c_1 = thirds * 0 + (position.to(tl.uint64) >> 32).to(tl.uint32)
    c_3 = thirds * 0
    for _ in tl.static_range(10):
        first = tl.full(c_0.shape, 0xD2511F53, tl.uint32)
        second = tl.full(c_0.shape, 0xCD9E8D57, tl.uint32)
        c_0, c_1, c_2, c_3 = (
            tl.umulhi(c_2, second) ^ c_1 ^ key_0,
            c_2 * second,
            tl.umulhi(c_0, first) ^ c_3 ^ key_1,
            c_0 * first,
        )
        key_0 += tl.full([], 0x9E3779B9, tl.uint32)
        key_1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c_0, c_1, c_2, c_3


@triton.jit
def times_of(words):
    """fp32 times of random bits, a tensor of uint32: `shared.kernels.sampling.reference.race_times`, bit for bit where
    products and sums are not fused."""
    numbers = (words >> 1).to(tl.int32)
    near = numbers < NEAR
    parts = (tl.where(near, numbers, 0x7FFFFFFF - numbers).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    bits = parts.to(tl.int32, bitcast=True) - ROOT_HALF_BITS
    exponents = tl.where(near, 0, bits >> 23).to(tl.float32)
    mantissas = ((bits & 0x7FFFFF) + ROOT_HALF_BITS).to(tl.float32, bitcast=True)
    rest = tl.where(near, -parts, mantissas - 1.0)
    sums = rest * -0.076285586 + 0.12910533
    sums = sums * rest - 0.13243358
    sums = sums * rest + 0.14180933
    sums = sums * rest - 0.1660893
    sums = sums * rest + 0.20002013
    sums = sums * rest - 0.2500159
    sums = sums * rest + 0.33333325
    sums = sums * rest - 0.49999988
    return -(exponents * 0.6931472 + (rest + rest * rest * sums))


@triton.jit
def times_of_tokens(seed, position, tokens):
    """fp32 times of any token ids, a tensor of int32 that are at least 0."""
    ids = tokens.to(tl.uint32)
    word_0, word_1, word_2, word_3 = token_words(seed, position, (ids >> 6) * 16 + (ids & 15))
    part = (ids >> 4) & 3
    return times_of(tl.where(part == 0, word_0, tl.where(part == 1, word_1, tl.where(part == 2, word_2, word_3))))
