"""How holders are stored in Redis, and the table of ids that says which worker each is. No redis import.

A block is one string, made of fixed-size records:

    key     see `Buckets`
    value   record, record, …    one for each holder, in the order of publication
    record  holder id (u32, little-endian)

A holder id stands for one tier of one worker process (name, incarnation). No id is assigned twice. So a record whose id
is not in the table is dead: its holder was superseded by a new incarnation, fell silent, or was asked to publish all
its blocks again.

No other program may use the index's Redis database. ACL users need the keys `~b:*` (on a cluster `~{*`) and
`~tandem:*`.

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

from shared.errors import Internal
from shared.kv_index.holders import Holder, PrefixMatch, Tier
from shared.rpc.convert import role_from_proto

HOLDER_ID_BYTES = 4

_TABLE = b"tandem:{index}:"
"""All bookkeeping is in one slot of a cluster."""
TABLE_TAG = b"index"
VERSION_KEY = _TABLE + b"version"
"""String: the index's epoch (8 random bytes, drawn when it was empty) + number of changes of the table (u64)."""
HOLDERS_KEY = _TABLE + b"holders"
"""Hash: the holder table; its fields are described above."""
PROGRESS_KEY = _TABLE + b"progress"
"""Hash: holder -> sequence number of its last change that was applied."""
SEEN_KEY = _TABLE + b"seen"
"""Sorted set: holder, by the time in seconds of its last message."""
RETIRED_KEY = _TABLE + b"retired"
"""Sorted set: superseded incarnation + name, by time in seconds; they may not publish again."""
ENTRY = struct.Struct("<Q4sB")
NEXT_FIELD = b"next"
DEAD_FIELD = b"dead"
_MAX_REMEMBERED = 65_536


def holder_ids(value: bytes) -> list[bytes]:
    """The id in each record, in order. Raises ValueError for a value of another length."""
    if len(value) % HOLDER_ID_BYTES:
        raise ValueError(f"{len(value)} bytes are no multiple of {HOLDER_ID_BYTES}")
    return [value[start : start + HOLDER_ID_BYTES] for start in range(0, len(value), HOLDER_ID_BYTES)]


@dataclass(frozen=True, slots=True)
class TableVersion:
    """The state of the table to which a reply of Redis refers."""

    epoch: bytes  # 8 random bytes; another epoch means another, emptied, index
    changes: int

    @classmethod
    def parse(cls, value: bytes) -> TableVersion:
        """Reads the value of the version key."""
        return cls(value[:8], int.from_bytes(value[8:16], "little"))


class HolderTable:
    """One snapshot. Turns the values of blocks into live holders, and caches them: neighbouring blocks of a prompt
    mostly have the same holders."""

    def __init__(self, version: TableVersion, fields: Mapping[bytes, bytes]) -> None:
        """`fields` is the whole hash. Raises Internal if it does not have the format described above."""
        self.version = version
        self.live: dict[bytes, Holder] = {}
        """Live holders by id, which is encoded as in the records."""
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

    def scattered(self, values: Iterable[bytes | None]) -> PrefixMatch:
        """Holders of all blocks, none of some."""
        return PrefixMatch(tuple(self._holders(value) if value is not None else () for value in values))

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
