"""What the KV store needs of an index, whatever it is kept in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shared.rpc.block_holders import PrefixMatch, Tier, WorkerIdentity


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The index as a whole."""

    num_blocks: int
    index_bytes: int  # memory of the index's server
    address: str  # without credentials


class BlockIndex(Protocol):
    """block hash → holders. `hashes` are 16 bytes each, one behind the other.

    Every method may run concurrently with itself and the others, here and in other processes over the same index;
    each is atomic per block. All raise StoreUnavailable within a bounded time when the index does not answer, and
    work again by themselves once it does.
    """

    async def start(self) -> None:
        """Connects. Raises ConfigError for a refused configuration, StoreUnavailable when nothing answers; the
        index can be used after the latter, and answers once its server does."""

    async def match(self, hashes: bytes) -> PrefixMatch:
        """The longest prefix of which every block has a live holder, in one round trip. Changes nothing."""

    async def publish(self, worker: WorkerIdentity, tier: Tier, hashes: bytes) -> int:
        """Adds the worker's tier to the holders of each block; returns how many were new.

        The first call of an incarnation, with hashes or without, makes it the newest of its name: everything that
        older ones published is dead from then on. Raises InvalidRequest for an incarnation that is dead itself.
        """

    async def remove(self, worker_name: str, incarnation: int, tier: Tier, hashes: bytes) -> int:
        """Takes the worker's tier from the holders of each block; returns how many it was among."""

    async def stats(self) -> IndexStats:
        """Size of the index. Cheap: it also serves as the probe."""

    async def close(self) -> None:
        """Frees what it owns; twice is fine."""
