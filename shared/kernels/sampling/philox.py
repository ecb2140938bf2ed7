"""Counter-based random numbers: a function of (seed, position, token) alone, so any worker can continue any sequence,
and two models that choose a token at the same position do so by the same numbers.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the seed is the
key, position and token are the counter. A counter gives numbers for four tokens, 16 apart, so that vectors of 16 tokens
have vectors of counters.
"""

from __future__ import annotations

import math

_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit random words for a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def token_word(seed: int, position: int, token: int) -> int:
    """The 32 random bits of a token id, for the choice at `position` of a sequence with this 64-bit seed."""
    counter = (position & _MASK, (position >> 32) & _MASK, (token >> 6) * 16 + token % 16, 0)
    return philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))[token // 16 % 4]


def time_of(word: int) -> float:
    """The exponentially distributed time of a token's 32 random bits, exact to a double's rounding; the kernels compute
    it in fp32, all of them to the same bits."""
    return -math.log1p(-((word >> 1) + 0.5) / (1 << 31))
