"""Maps holder ids to workers: a snapshot of the table in Redis. No redis import.

Fields of the hash `tandem:{index}:holders`:

    next                 last id assigned; begins at a random number in every epoch, so that ids do not repeat
    dead                 number of ids removed from the table
    <tier (1)><name>     incarnation (u64) + id (u32) + role (1 byte), little-endian

Only live holders are in it: when a new incarnation registers, all tiers of its predecessor are removed. "Newest" means
registered last, since incarnations are random numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from services.kvstore.holder_records import holder_ids
from shared.errors import Internal
from shared.kv_index.holders import Holder, PrefixMatch, Tier
from shared.rpc.convert import role_from_proto

ENTRY = struct.Struct("<Q4sB")
NEXT_FIELD = b"next"
DEAD_FIELD = b"dead"
_MAX_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class TableVersion:
    """The state of the table to which a reply of Redis refers."""

    epoch: bytes  # 8 random bytes; another epoch means another, emptied, index
    changes: int

    @classmethod
    def parse(cls, value: bytes) -> TableVersion:
        """From the value of the version key."""
        return cls(value[:8], int.from_bytes(value[8:16], "little"))


class HolderTable:
    """One snapshot. Turns the values of blocks into live holders, and caches them: neighbouring blocks of a prompt
    mostly have the same holders."""

    def __init__(self, version: TableVersion, fields: Mapping[bytes, bytes]) -> None:
        """`fields` is the whole hash. Raises Internal if it does not have the format described above."""
        self.version = version
        self.live: dict[bytes, Holder] = {}
        """By id, encoded as in the records."""
        self._remembered: dict[bytes, tuple[Holder, ...]] = {}
        try:
            self.num_deaths = int(fields.get(DEAD_FIELD, b"0"))
            """Ids removed from the table so far in this epoch."""
            for field, value in fields.items():
                if field not in (NEXT_FIELD, DEAD_FIELD):
                    incarnation, holder_id, role = ENTRY.unpack(value)
                    self.live[holder_id] = Holder(
                        field[1:].decode(), incarnation, role_from_proto(role), Tier(field[0])
                    )
        except (IndexError, ValueError, struct.error) as error:
            raise Internal(f"the index's holder table is damaged: {error!r}") from error

    def covers(self, version: TableVersion) -> bool:
        """Whether this snapshot has every holder that a reply of that version can name."""
        return self.version.epoch == version.epoch and self.version.changes >= version.changes

    def prefix(self, values: Iterable[bytes | None]) -> PrefixMatch:
        """Holders of the leading blocks, up to the first one that no live worker holds. None is an absent key."""
        blocks: list[tuple[Holder, ...]] = []
        for value, run in groupby(values):
            holders = self._holders(value) if value is not None else ()
            if not holders:
                break
            blocks += [holders] * sum(1 for _ in run)
        return PrefixMatch(tuple(blocks))

    def _holders(self, value: bytes) -> tuple[Holder, ...]:
        holders = self._remembered.get(value)
        if holders is None:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            holders = self._remembered[value] = self._live_holders(value)
        return holders

    def _live_holders(self, value: bytes) -> tuple[Holder, ...]:
        try:
            ids = holder_ids(value)
        except ValueError as error:
            raise Internal(f"a block's holders in the index are damaged: {error}") from error
        return tuple(holder for holder_id in ids if (holder := self.live.get(holder_id)) is not None)
