"""How holders are stored in Redis: one string for each block, made of fixed-size records. No redis import.

    key     see `buckets`
    value   record, record, …    one for each holder, in the order of publication
    record  holder id (u32, little-endian)

A holder id stands for one tier of one worker process (name, incarnation); `holder_table` maps it. No id is assigned
twice. So a record whose id is not in the table is dead: its holder was superseded by a new incarnation, fell silent, or
was asked to publish all its blocks again.

No other program may use the index's Redis database. ACL users need the keys `~b:*` (on a cluster `~{*`) and
`~tandem:*`.
"""

from __future__ import annotations

HOLDER_ID_BYTES = 4

_TABLE = b"tandem:{index}:"
"""All bookkeeping is in one slot of a cluster."""
TABLE_TAG = b"index"
VERSION_KEY = _TABLE + b"version"
"""String: the index's epoch (8 random bytes, drawn when it was empty) + number of changes of the table (u64)."""
HOLDERS_KEY = _TABLE + b"holders"
"""Hash: the holder table; its fields are described in `holder_table`."""
PROGRESS_KEY = _TABLE + b"progress"
"""Hash: holder -> sequence number of its last change that was applied."""
SEEN_KEY = _TABLE + b"seen"
"""Sorted set: holder, by the time in seconds of its last message."""
RETIRED_KEY = _TABLE + b"retired"
"""Sorted set: superseded incarnation + name, by time in seconds; they may not publish again."""
BOOKKEEPING_KEYS = (VERSION_KEY, HOLDERS_KEY, PROGRESS_KEY, SEEN_KEY, RETIRED_KEY)


def holder_ids(value: bytes) -> list[bytes]:
    """The id in each record, in order. Raises ValueError for a value of another length."""
    if len(value) % HOLDER_ID_BYTES:
        raise ValueError(f"{len(value)} bytes are no multiple of {HOLDER_ID_BYTES}")
    return [value[start : start + HOLDER_ID_BYTES] for start in range(0, len(value), HOLDER_ID_BYTES)]
