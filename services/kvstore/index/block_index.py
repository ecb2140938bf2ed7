"""The interface of an index of blocks, independent of its storage."""

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
    """The index has lost changes that it had acknowledged: the holder must publish all its blocks again."""


class BlockIndex(Protocol):
    """block hash → holders. `hashes` are 16 bytes each, concatenated. A holder is one tier of one worker.

    Every method may run concurrently with itself and the others, here and in other processes over the same index;
    each is atomic per block. All raise StoreUnavailable within a bounded time when the index does not answer, and
    recover without a restart once it does.

    A stamped change is one of a series without gaps. It raises ResyncNeeded, and changes nothing, when the index has
    lost earlier changes that it had acknowledged; a later change that starts the series over ends that state. A change
    that arrives after a later one is ignored.
    """

    async def start(self) -> None:
        """Connects. Raises ConfigError for a refused configuration, StoreUnavailable when nothing answers; after the
        latter the index works as soon as its server answers."""

    async def match(self, hashes: bytes, *, scattered: bool = False) -> PrefixMatch:
        """The longest prefix of which every block has a live holder, in one round trip. `scattered`: all blocks, also
        behind one without a holder. Changes nothing."""

    async def publish(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = ...) -> int:
        """Adds the worker's tier to the holders of each block; returns how many were new.

        The first call of an incarnation, with hashes or without, registers it as the newest of its name: from then on
        everything that older ones published is dead. Raises InvalidRequest for an incarnation that was superseded.
        """

    async def remove(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = ...) -> int:
        """Removes the worker's tier from the holders of each block; returns how many blocks had it."""

    async def forget_all(self) -> int:
        """Forgets all holders at once and returns how many. Each is asked to publish all its blocks again when it next
        sends a change."""

    async def stats(self) -> IndexStats:
        """Size of the index."""

    async def probe(self) -> None:
        """Returns when the index answers. If it has lost data, forgets the holders, so that they publish again."""

    async def close(self) -> None:
        """Frees what it owns; idempotent."""
