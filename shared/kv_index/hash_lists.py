"""Block hashes in messages: one behind the other, 16 bytes each, validated at the edge."""

from __future__ import annotations

from typing import Protocol

from shared.errors import InvalidRequest
from shared.kv.hashing import HASH_BYTES
from shared.kv.transfer import TRAILER_INDEX

MAX_HASHES = 65_536
"""Block hashes in one request: a prompt of a million tokens."""


class WithHashes(Protocol):
    """Any request about blocks."""

    block_hashes: bytes


def hashes_of(message: WithHashes) -> bytes:
    """The request's hashes, one behind the other. Raises InvalidRequest (field block_hashes)."""
    hashes = message.block_hashes
    num_hashes, rest = divmod(len(hashes), HASH_BYTES)
    if rest:
        raise InvalidRequest(
            f"block_hashes has {len(hashes)} bytes, which is no multiple of {HASH_BYTES}",
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
    """The request's hashes, as many as have an index on the transfer plane. Raises InvalidRequest."""
    hashes = hashes_of(message)
    names = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
    if len(names) > TRAILER_INDEX:
        raise InvalidRequest(
            f"block_hashes has {len(names)} hashes, the limit is {TRAILER_INDEX}",
            field="block_hashes",
            limit=TRAILER_INDEX,
        )
    return names
