"""The block index in one Redis or Valkey server.

`match` is one MGET, whatever the prompt's length: the table's version, then every block. MGET and not a script that
stops at the first absent block: Redis is the one part that the whole fleet shares, and for 512 blocks it spends
about 0.1 ms on an MGET but ten times that in Lua. The holder table is kept here and read again only when the
version that came with the blocks says that a worker registered since, so a superseded incarnation is never
reported, not even by a store that did not see its successor arrive.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from services.kvstore.holder_table import INCARNATION_BYTES, HolderTable, TableVersion
from services.kvstore.index import IndexStats
from services.kvstore.records import BOOKKEEPING_KEYS, HOLDERS_KEY, VERSION_KEY, block_keys
from services.kvstore.redis_client import RedisClient
from services.kvstore.scripts import PUBLISH, REMOVE, SUPERSEDED
from shared.errors import InvalidRequest, StoreUnavailable
from shared.kv.hashing import HASH_BYTES
from shared.rpc.block_holders import PrefixMatch, Tier, WorkerIdentity

SCRIPT_HASHES = 1024
"""Blocks in one run of a script, during which Redis serves nobody else: one or two milliseconds."""


class RedisIndex:
    """`BlockIndex` over a RedisClient, which it does not own."""

    def __init__(self, redis: RedisClient) -> None:
        """No I/O before `start()`."""
        self._redis = redis
        self._table: HolderTable | None = None
        self._reading_table = asyncio.Lock()

    async def start(self) -> None:
        """See BlockIndex."""
        await self._redis.check()

    async def close(self) -> None:
        """See BlockIndex. The client stays open: it is shared with the sweeper."""
        self._table = None

    async def match(self, hashes: bytes) -> PrefixMatch:
        """See BlockIndex."""
        if not hashes:
            return PrefixMatch()
        keys = [VERSION_KEY, *block_keys(hashes)]
        for _ in range(2):
            version, *values = await self._redis.command("MGET", *keys)
            if version is None:
                return PrefixMatch()  # nobody ever published
            table = await self._table_for(TableVersion.parse(version))
            if table is not None:
                return table.prefix(values)
        raise StoreUnavailable(f"the index at {self._redis.address} was emptied while it was read")

    async def publish(self, worker: WorkerIdentity, tier: Tier, hashes: bytes) -> int:
        """See BlockIndex."""
        head = (
            worker.incarnation.to_bytes(INCARNATION_BYTES, "little"),
            worker.name.encode(),
            bytes([worker.role]),
            bytes([tier]),
            secrets.token_bytes(8),
        )
        added = await self._redis.scripts(PUBLISH, *((*head, part) for part in _parts(hashes) or [b""]))
        if SUPERSEDED in added:
            raise InvalidRequest(
                f"incarnation {worker.incarnation:016x} of worker {worker.name} is superseded: another process "
                "with that name published since",
                field="worker.incarnation",
            )
        return sum(added)

    async def remove(self, worker_name: str, incarnation: int, tier: Tier, hashes: bytes) -> int:
        """See BlockIndex."""
        if not hashes:
            return 0
        head = (incarnation.to_bytes(INCARNATION_BYTES, "little"), worker_name.encode(), bytes([tier]))
        return sum(await self._redis.scripts(REMOVE, *((*head, part) for part in _parts(hashes))))

    async def stats(self) -> IndexStats:
        """See BlockIndex. All keys of the database beside our bookkeeping are blocks."""
        num_keys, num_bookkeeping, memory = await self._redis.commands(
            ("DBSIZE",), ("EXISTS", *BOOKKEEPING_KEYS), ("INFO", "memory")
        )
        return IndexStats(num_keys - num_bookkeeping, _used_memory(memory), self._redis.address)

    async def _table_for(self, version: TableVersion) -> HolderTable | None:
        """A snapshot that covers `version`; None when the index was emptied since. Read once for all who wait."""
        async with self._reading_table:
            if self._table is None or not self._table.covers(version):
                self._table = await read_table(self._redis)
            return self._table if self._table is not None and self._table.covers(version) else None


async def read_table(redis: RedisClient) -> HolderTable | None:
    """The holder table as it is now; None when nobody has published yet."""
    version, fields = await redis.commands(("GET", VERSION_KEY), ("HGETALL", HOLDERS_KEY), atomic=True)
    return HolderTable(TableVersion.parse(version), fields) if version is not None else None


def _parts(hashes: bytes) -> list[bytes]:
    size = SCRIPT_HASHES * HASH_BYTES
    return [hashes[start : start + size] for start in range(0, len(hashes), size)]


def _used_memory(info: dict[str, Any]) -> int:
    """redis-py parses INFO into a mapping."""
    return int(info["used_memory"])
