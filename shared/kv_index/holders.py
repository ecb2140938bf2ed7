"""Who holds which block: types that the KV store, its clients and the router's placement share. No grpc here.

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

    Every attempt has a number of its own, so that a delayed message cannot undo a later one.
    """

    sequence: int  # 1 .. 2**53 - 1; 0 = not numbered, applied in order of arrival
    acknowledged: int  # the last number that was answered: the index must know it
    reset: bool = False  # drop what this holder published before


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a chain of blocks that is held somewhere.

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
