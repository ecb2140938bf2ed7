"""Which worker a holder id stands for, and which of them are alive: a snapshot of the table in Redis. No redis import.

Fields of the hash `tandem:holders`, where an identity is incarnation (u64, little-endian) + worker name:

    next            last id given out
    i:<identity>    holder id
    h:<id>          identity
    w:<name>        the name's newest incarnation (8 bytes) + its role (1 byte)

"Newest" is the order of registration: incarnations are random numbers. An id whose incarnation is not its name's
newest is dead; ids are never given out twice within one epoch of the index.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.kvstore.records import unpack_records
from shared.errors import Internal
from shared.rpc.block_holders import Holder, PrefixMatch, WorkerRole

INCARNATION_BYTES = 8
_MAX_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class TableVersion:
    """State of the table that an answer of Redis belongs to."""

    epoch: bytes  # 8 random bytes; another epoch means another, emptied, index
    changes: int

    @classmethod
    def parse(cls, value: bytes) -> TableVersion:
        """From the value of `tandem:version`."""
        return cls(value[:8], int.from_bytes(value[8:16], "little"))


def identity(name: str, incarnation: int) -> bytes:
    """How a worker process is called in the table."""
    return incarnation.to_bytes(INCARNATION_BYTES, "little") + name.encode()


@dataclass(frozen=True, slots=True)
class _Worker:
    name: str
    incarnation: int
    role: WorkerRole


class HolderTable:
    """One snapshot. Turns values of blocks into live holders, and remembers values it has seen: neighbours in a
    prompt mostly have the same holders."""

    def __init__(self, version: TableVersion, fields: Mapping[bytes, bytes]) -> None:
        """`fields` is the whole hash. Raises Internal when it is not in the shape described above."""
        self.version = version
        self.dead: dict[int, bytes] = {}
        """Identity of each superseded incarnation that still has an id."""
        self._live: dict[int, _Worker] = {}
        self._remembered: dict[bytes, tuple[Holder, ...]] = {}
        try:
            self._read(fields)
        except (KeyError, ValueError, struct.error) as error:
            raise Internal(f"the index's holder table is damaged: {error!r}") from error

    def covers(self, version: TableVersion) -> bool:
        """True when this snapshot knows every holder that an answer of that version can name."""
        return self.version.epoch == version.epoch and self.version.changes >= version.changes

    def prefix(self, values: Iterable[bytes | None]) -> PrefixMatch:
        """Holders of the leading blocks up to the first that no live worker holds; None is an absent key."""
        blocks: list[tuple[Holder, ...]] = []
        for value in values:
            holders = self._holders(value) if value is not None else ()
            if not holders:
                break
            blocks.append(holders)
        return PrefixMatch(tuple(blocks))

    def _holders(self, value: bytes) -> tuple[Holder, ...]:
        holders = self._remembered.get(value)
        if holders is None:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            holders = self._remembered[value] = self._live_holders(value)
        return holders

    def _live_holders(self, value: bytes) -> tuple[Holder, ...]:
        """Ids that are in neither map were swept after the answer was read: as dead as the dead."""
        try:
            records = unpack_records(value)
        except (ValueError, struct.error) as error:
            raise Internal(f"a block's holders in the index are damaged: {error}") from error
        return tuple(
            Holder(worker.name, worker.incarnation, worker.role, tier)
            for holder_id, tier in records
            if (worker := self._live.get(holder_id)) is not None
        )

    def _read(self, fields: Mapping[bytes, bytes]) -> None:
        for field, value in fields.items():
            if not field.startswith(b"h:"):
                continue
            holder_id, incarnation, name = int(field[2:]), value[:INCARNATION_BYTES], value[INCARNATION_BYTES:]
            newest = fields[b"w:" + name]
            if newest[:INCARNATION_BYTES] == incarnation:
                role = WorkerRole(newest[INCARNATION_BYTES])
                self._live[holder_id] = _Worker(name.decode(), int.from_bytes(incarnation, "little"), role)
            else:
                self.dead[holder_id] = value
