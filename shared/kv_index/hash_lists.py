"""Block hashes in messages: concatenated, 16 bytes each, validated where a request arrives."""

from __future__ import annotations

from typing import Protocol

from shared.errors import InvalidRequest
from shared.kv.hashing import HASH_BYTES
from shared.kv.transfer import TRAILER_INDEX

MAX_HASHES = 65_536
"""Most block hashes in one request: enough for a prompt of a million tokens."""


class WithHashes(Protocol):
    """A request with a list of block hashes."""

    block_hashes: bytes


def hashes_of(message: WithHashes) -> bytes:
    """The request's hashes, concatenated. Raises InvalidRequest (field block_hashes)."""
    hashes = message.block_hashes
    num_hashes, rest = divmod(len(hashes), HASH_BYTES)
    if rest:
        raise InvalidRequest(
            f"block_hashes has {len(hashes)} bytes, which is not a multiple of {HASH_BYTES}",
            field="block_hashes",
            limit=HASH_BYTES,
        )
    if num_hashes > MAX_HASHES:
        raise InvalidRequest(
            f"block_hashes has {num_hashes} hashes, the limit is {MAX_HASHES}",
            field="block_hashes",
            limit=MAX_HASHES,
        )
    return hashes


def split_hashes(message: WithHashes) -> list[bytes]:
    """The request's hashes, one by one. Raises InvalidRequest, also for more blocks than one transfer can index."""
    hashes = hashes_of(message)
    names = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
    if len(names) > TRAILER_INDEX:
        raise InvalidRequest(
            f"block_hashes has {len(names)} hashes, the limit is {TRAILER_INDEX}",
            field="block_hashes",
            limit=TRAILER_INDEX,
        )
    return names
