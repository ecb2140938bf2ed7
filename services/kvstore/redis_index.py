"""The block index in Redis or Valkey, on one server or a cluster.

`match` is one round trip for any prompt length: it reads the table's version and every block. It uses MGET, not a
script that stops at the first absent block: the whole fleet shares Redis, which spends about 0.1 ms on an MGET of 512
blocks but ten times that in Lua. The holder table is cached here and read again only when the version in the reply
shows that a worker has registered since. So a superseded incarnation is never reported, not even by a store that did
not see its successor register.

On a cluster, version and blocks are read from several nodes at the same time. A holder that registers between the two
reads is missed in that one match; nothing else can go wrong, because ids are never assigned twice.
"""

from __future__ import annotations

import asyncio
import secrets

from services.kvstore.buckets import Buckets, slot_of
from services.kvstore.holder_records import BOOKKEEPING_KEYS, TABLE_TAG, VERSION_KEY
from services.kvstore.holder_table import HolderTable, TableVersion
from services.kvstore.index import IndexStats, ResyncNeeded
from services.kvstore.resp.client import RedisClient, info_fields, replies_of
from services.kvstore.resp.command import Command, LuaScript
from services.kvstore.resp.redis_node import RedisConnection
from services.kvstore.scripts import (
    ADMIT,
    FORGET_ALL,
    PUBLISH,
    READ_TABLE,
    REMOVE,
    RESYNC,
    STALE,
    SUPERSEDED,
    TABLE_KEYS,
    UNKNOWN,
)
from shared.errors import InvalidRequest, StoreUnavailable
from shared.identity import WorkerIdentity
from shared.kv_index.holders import EventStamp, PrefixMatch, Tier
from shared.rpc.convert import role_to_proto

SCRIPT_HASHES = 1024
"""Blocks in one run of a script, which blocks Redis for one or two milliseconds."""
RETIRED_MAX_AGE_S = 86_400
"""How long a superseded incarnation is refused: longer than any stall of a process."""
TABLE_SLOT = slot_of(TABLE_TAG)
_UNSTAMPED = EventStamp(sequence=0, acknowledged=0)


class RedisIndex:
    """`BlockIndex` over a RedisClient, which it does not own."""

    def __init__(self, redis: RedisClient) -> None:
        """No I/O before `start()`."""
        self._redis = redis
        self._buckets = Buckets.cluster() if redis.is_cluster else Buckets.single()
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
        read = self._buckets.read(hashes, VERSION_KEY)
        for _ in range(2):
            version, values = read.collect(await self._redis.call(*read.commands, connection=RedisConnection.READ))
            if version is None:
                return PrefixMatch()  # nothing was ever published
            table = await self._table_for(TableVersion.parse(version))
            if table is not None:
                return table.prefix(values)
        raise StoreUnavailable(f"the index at {self._redis.address} was emptied while it was read")

    async def publish(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = _UNSTAMPED) -> int:
        """See BlockIndex."""
        holder_id = await self._admit(worker, tier, stamp, register=True)
        return await self._write(PUBLISH, hashes, holder_id) if holder_id is not None else 0

    async def remove(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = _UNSTAMPED) -> int:
        """See BlockIndex."""
        holder_id = await self._admit(worker, tier, stamp, register=False)
        return await self._write(REMOVE, hashes, holder_id) if holder_id is not None else 0

    async def stats(self) -> IndexStats:
        """See BlockIndex. All keys of the database but the bookkeeping are blocks."""
        num_keys, used_bytes = 0, 0
        for node in await self._redis.nodes():
            size, info = replies_of(
                node, await node.ask((Command.of("DBSIZE"), Command.of("INFO", "memory")), RedisConnection.READ)
            )
            num_keys += size
            used_bytes += int(info_fields(info)["used_memory"])
        commands = [Command.of("EXISTS", *BOOKKEEPING_KEYS, slot=TABLE_SLOT), *self._markers("EXISTS")]
        num_bookkeeping = sum(await self._redis.call(*commands, connection=RedisConnection.READ))
        return IndexStats(num_keys - num_bookkeeping, used_bytes, self._redis.address)

    async def probe(self) -> None:
        """See BlockIndex.

        Every bucket of a cluster has a marker. Where one is missing, a node has lost its data: all holders are
        forgotten, and each is asked to publish all its blocks again when it next sends anything.
        """
        version, *markers = await self._redis.call(
            Command.of("GET", VERSION_KEY, slot=TABLE_SLOT), *self._markers("EXISTS"), connection=RedisConnection.READ
        )
        if all(markers):
            return
        if version is not None:
            await self._forget(TableVersion.parse(version))
        await self._redis.call(*self._markers("SET", "1"))

    async def forget_all(self) -> int:
        """See BlockIndex. The sweeper removes what they published."""
        table = await read_table(self._redis)
        if table is None:
            return 0
        await self._forget(table.version)
        return len(table.live)

    async def _forget(self, version: TableVersion) -> None:
        """Forgets all holders, unless the index has been emptied since."""
        await self._redis.call(Command.script(FORGET_ALL, TABLE_KEYS, (version.epoch,), TABLE_SLOT))

    def _markers(self, verb: str, *arguments: str) -> list[Command]:
        if not self._redis.is_cluster:
            return []
        pairs = zip(self._buckets.prefixes, self._buckets.slots, strict=True)
        return [Command.of(verb, prefix, *arguments, slot=slot) for prefix, slot in pairs]

    async def _admit(self, worker: WorkerIdentity, tier: Tier, stamp: EventStamp, *, register: bool) -> bytes | None:
        """The holder id to write with; None when there is nothing to write."""
        arguments = (
            bytes([tier]),
            worker.name.encode(),
            worker.incarnation.to_bytes(8, "little"),
            bytes([role_to_proto(worker.role)]),
            int(register),
            secrets.token_bytes(8),
            secrets.randbits(32),
            stamp.sequence,
            stamp.acknowledged,
            int(stamp.reset),
            RETIRED_MAX_AGE_S,
        )
        [answer] = await self._redis.call(Command.script(ADMIT, TABLE_KEYS, arguments, TABLE_SLOT))
        if isinstance(answer, bytes):
            return answer
        if answer == SUPERSEDED and register:
            raise InvalidRequest(
                f"incarnation {worker.incarnation:016x} of worker {worker.name} is superseded: another process "
                "with that name published since",
                field="worker.incarnation",
            )
        if answer == RESYNC:
            raise ResyncNeeded
        assert answer in (SUPERSEDED, STALE, UNKNOWN)
        return None

    async def _write(self, script: LuaScript, hashes: bytes, holder_id: bytes) -> int:
        commands = [
            Command.script(
                script,
                (self._buckets.prefixes[part.bucket],),
                (part.hashes, holder_id),
                self._buckets.slots[part.bucket],
            )
            for part in self._buckets.parts(hashes, SCRIPT_HASHES)
        ]
        return sum(await self._redis.call(*commands)) if commands else 0

    async def _table_for(self, version: TableVersion) -> HolderTable | None:
        """A snapshot that covers `version`; None when the index was emptied since. Concurrent calls share one read."""
        if self._table is not None and self._table.covers(version):
            return self._table
        async with self._reading_table:
            if self._table is None or not self._table.covers(version):
                self._table = await read_table(self._redis)
            return self._table if self._table is not None and self._table.covers(version) else None


async def read_table(redis: RedisClient) -> HolderTable | None:
    """The current holder table; None if nothing was published yet."""
    [(version, fields)] = await redis.call(
        Command.script(READ_TABLE, TABLE_KEYS, (), TABLE_SLOT), connection=RedisConnection.READ
    )
    if version is None:
        return None
    return HolderTable(TableVersion.parse(version), dict(zip(fields[::2], fields[1::2], strict=True)))
