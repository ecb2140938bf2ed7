"""Seeds of several answers to one prompt."""

from __future__ import annotations

from hashlib import blake2b


def derived_seed(seed: int, index: int) -> int:
    """Seed of answer `index` to one prompt, 64 bits: the request's own for the first, else hashed from it."""
    if index == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
