"""Holders of blocks and lists of hashes: shared by the KV store, its clients and the router's placement. No grpc here.

Tiers have the numbers of `tandem.v1.Tier`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from shared.errors import InvalidRequest
from shared.identity import WorkerRole
from shared.kv.hashing import HASH_BYTES
from shared.kv.transfer import TRAILER_INDEX

MAX_HASHES = 65_536
"""Most block hashes in one request: enough for a prompt of a million tokens."""


class Tier(IntEnum):
    """Where a holder keeps a block, fastest first."""

    DEVICE = 1
    HOST = 2
    DISK = 3


@dataclass(frozen=True, slots=True)
class Holder:
    """One worker's tier that holds a block."""

    worker_name: str
    incarnation: int
    role: WorkerRole
    tier: Tier


@dataclass(frozen=True, slots=True)
class EventStamp:
    """The sequence number of a change among one holder's changes.

    Every attempt to send a change has a new number, so that a delayed message cannot undo a later one.
    """

    sequence: int  # 1 .. 2**53 - 1; 0 = not numbered, applied in order of arrival
    acknowledged: int  # the last number that was answered; the index must have it
    reset: bool = False  # drop everything that this holder published before


UNSTAMPED = EventStamp(sequence=0, acknowledged=0)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a chain of blocks that has holders; of a scattered match all its blocks.

    `blocks[i]` are the holders of block i, at least one, in the order in which they published it; none of some blocks
    of a scattered match.
    """

    blocks: tuple[tuple[Holder, ...], ...] = ()

    @property
    def num_blocks(self) -> int:
        """Length of the prefix in blocks."""
        return len(self.blocks)


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    """The hashes concatenated, as in messages; raises InvalidRequest unless each has 16 bytes."""
    joined = b"".join(hashes)
    if not set(map(len, hashes)) <= {HASH_BYTES}:
        raise InvalidRequest(
            f"every block hash must have {HASH_BYTES} bytes",
            field="block_hashes",
            limit=HASH_BYTES,
        )
    return joined


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
