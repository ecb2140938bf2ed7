"""How holders stand in Redis: one string a block, fixed-size records one behind the other. No redis import.

    key     see `buckets`
    value   record, record, …    one for each holder, in the order of publication
    record  holder id (u32, little-endian)

A holder id stands for one tier of one worker process (name, incarnation); `holder_table` says which. No id is given out
twice, so a record whose id is not in the table is dead, whatever became of its holder: superseded by a new
incarnation, gone silent, or told to publish everything anew.

The index has its Redis database to itself. ACL users need the keys `~b:*` (on a cluster `~{*`) and `~tandem:*`.
"""

from __future__ import annotations

HOLDER_ID_BYTES = 4

_TABLE = b"tandem:{index}:"
"""All bookkeeping lies in one slot of a cluster."""
TABLE_TAG = b"index"
VERSION_KEY = _TABLE + b"version"
"""String: the index's epoch (8 random bytes, drawn when it was empty) + number of changes of the table (u64)."""
HOLDERS_KEY = _TABLE + b"holders"
"""Hash: the holder table; its fields are described in `holder_table`."""
PROGRESS_KEY = _TABLE + b"progress"
"""Hash: holder -> sequence number of the last change that was taken from it."""
SEEN_KEY = _TABLE + b"seen"
"""Sorted set: holder, by the time in seconds at which it last said anything."""
RETIRED_KEY = _TABLE + b"retired"
"""Sorted set: superseded incarnation + name, by time in seconds; they may not publish again."""
BOOKKEEPING_KEYS = (VERSION_KEY, HOLDERS_KEY, PROGRESS_KEY, SEEN_KEY, RETIRED_KEY)


def holder_ids(value: bytes) -> list[bytes]:
    """The id in each record, in order. Raises ValueError when the value is not ours."""
    if len(value) % HOLDER_ID_BYTES:
        raise ValueError(f"{len(value)} bytes are no multiple of {HOLDER_ID_BYTES}")
    return [value[start : start + HOLDER_ID_BYTES] for start in range(0, len(value), HOLDER_ID_BYTES)]
