"""Holders of blocks: types shared by the KV store, its clients and the router's placement. No grpc here.

Tiers have the numbers of `tandem.v1.Tier`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from shared.errors import InvalidRequest
from shared.identity import WorkerRole
from shared.kv.hashing import HASH_BYTES


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


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a chain of blocks that has holders.

    `blocks[i]` are the holders of block i, at least one, in the order in which they published it.
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
