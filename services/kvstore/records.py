"""How holders stand in Redis: one string a block, fixed-size records one behind the other. No redis import.

    key     b"b:" + block hash (16 bytes)
    value   record, record, …    one for each (holder, tier), in the order of publication
    record  holder id (u32, little-endian) + tier (u8)

The two bytes of prefix tell blocks from bookkeeping in a SCAN and give ACL users a key pattern (`~b:* ~tandem:*`).
A holder id stands for one (worker name, incarnation); `holder_table` says which. The index has its Redis database
to itself, and that database must not evict (`maxmemory-policy noeviction`): a lost bookkeeping key is a lost index.
"""

from __future__ import annotations

import struct

from shared.kv.hashing import HASH_BYTES
from shared.rpc.block_holders import Tier

BLOCK_PREFIX = b"b:"
RECORD = struct.Struct("<IB")

VERSION_KEY = b"tandem:version"
"""String: the index's epoch (8 random bytes, drawn when it was empty) + number of changes of the table (u64)."""
HOLDERS_KEY = b"tandem:holders"
"""Hash: the holder table; its fields are described in `holder_table`."""
RETIRED_KEY = b"tandem:retired"
"""Sorted set: identities swept from the table, by time in seconds; they may not publish again."""
BOOKKEEPING_KEYS = (VERSION_KEY, HOLDERS_KEY, RETIRED_KEY)


def block_keys(hashes: bytes) -> list[bytes]:
    """The keys of concatenated 16-byte block hashes, in order."""
    return [BLOCK_PREFIX + hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]


def unpack_records(value: bytes) -> list[tuple[int, Tier]]:
    """(holder id, tier) of each record, in order. Raises ValueError or struct.error when it is not ours."""
    return [(holder_id, Tier(tier)) for holder_id, tier in RECORD.iter_unpack(value)]
