"""What the KV store needs of an index, whatever it is kept in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shared.identity import WorkerIdentity
from shared.kv_index.holders import EventStamp, PrefixMatch, Tier


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The index as a whole."""

    num_blocks: int
    index_bytes: int  # memory of the index's server
    address: str  # without credentials


class ResyncNeeded(Exception):
    """The index has lost changes that this holder was told are in it: it must publish everything anew."""


class BlockIndex(Protocol):
    """block hash → holders. `hashes` are 16 bytes each, one behind the other. A holder is one tier of one worker.

    Every method may run concurrently with itself and the others, here and in other processes over the same index;
    each is atomic per block. All raise StoreUnavailable within a bounded time when the index does not answer, and
    work again by themselves once it does.

    A stamped change is one of an unbroken series. It raises ResyncNeeded, and changes nothing, when the index does not
    know all that the holder was told it does; a later one that starts over ends that. A change that arrives after a
    later one is ignored.
    """

    async def start(self) -> None:
        """Connects. Raises ConfigError for a refused configuration, StoreUnavailable when nothing answers; the
        index can be used after the latter, and answers once its server does."""

    async def match(self, hashes: bytes) -> PrefixMatch:
        """The longest prefix of which every block has a live holder, in one round trip. Changes nothing."""

    async def publish(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = ...) -> int:
        """Adds the worker's tier to the holders of each block; returns how many were new.

        The first call of an incarnation, with hashes or without, makes it the newest of its name: everything that
        older ones published is dead from then on. Raises InvalidRequest for an incarnation that is dead itself.
        """

    async def remove(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = ...) -> int:
        """Takes the worker's tier from the holders of each block; returns how many it was among."""

    async def forget_all(self) -> int:
        """Ends all claims at once: every holder starts over as soon as it next says anything. Returns how many holders
        were forgotten."""

    async def stats(self) -> IndexStats:
        """Size of the index."""

    async def probe(self) -> None:
        """Whether the index answers, and whether it is whole; makes sure that holders hear of it where it is not."""

    async def close(self) -> None:
        """Frees what it owns; twice is fine."""
