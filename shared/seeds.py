"""Seeds of a request's answers, derived from the request's own."""

from __future__ import annotations

from hashlib import blake2b

SAMPLER_VERSION = 2
"""Version of the function from logits, seed and position to a token. An answer cannot be continued with another
version: its tokens would not be those of its seed. 1, which messages do not name, drew by one number a position."""


def derived_seed(seed: int, index: int) -> int:
    """Seed of answer `index` to one prompt, 64 bits: the request's own for the first, else hashed from it."""
    if index == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
