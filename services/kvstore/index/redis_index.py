"""The block index in Redis or Valkey, on one server or a cluster.

`match` is one round trip for any prompt length: it reads the table's version and every block. It uses MGET, not a
script that stops at the first absent block: the whole fleet shares Redis, which spends about 0.1 ms on an MGET of 512
blocks but ten times that in Lua. The holder table is cached here and read again only when the version in the reply
shows that a worker has registered since. So a superseded incarnation is never reported, not even by a store that did
not see its successor register.

On a cluster, version and blocks are read from several nodes at the same time. A holder that registers between the two
reads is missed in that one match; nothing else can go wrong, because ids are never assigned twice.

On one server all blocks are one bucket: the key is `b:` + hash, and one MGET reads a whole prompt. A cluster hashes
keys to 16,384 slots, and one command can read several keys only if they share a slot. So blocks are divided into 128
buckets by the first byte of their hash; a key is `{tag}` + hash, with one two-letter tag a bucket. A bucket's keys
share a slot. The buckets' slots are spread evenly, so every node has its share of buckets. Block hashes are uniform, so
the blocks of a prompt, also of a popular system prompt, spread evenly over all nodes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_letters, digits
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.kvstore.index.block_index import IndexStats, ResyncNeeded
from services.kvstore.index.holder_table import TABLE_TAG, VERSION_KEY, HolderTable, TableVersion
from services.kvstore.index.scripts import (
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
from services.kvstore.record_service import count_command
from services.kvstore.resp.client import RedisClient, info_fields, replies_of
from services.kvstore.resp.command import NUM_SLOTS, Command, LuaScript, slot_of
from services.kvstore.resp.redis_node import RedisConnection
from shared.errors import InvalidRequest, StoreUnavailable
from shared.identity import WorkerIdentity
from shared.kv.hashing import HASH_BYTES
from shared.kv_index.holders import UNSTAMPED, EventStamp, PrefixMatch, Tier
from shared.rpc.convert import role_to_proto

NUM_CLUSTER_BUCKETS = 128
SCRIPT_HASHES = 1024
"""Blocks in one run of a script, which blocks Redis for one or two milliseconds."""
RETIRED_MAX_AGE_S = 86_400
"""How long a superseded incarnation is refused: longer than any stall of a process."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a call's blocks: those of one bucket."""

    bucket: int
    hashes: bytes


class Buckets:
    """The keys of one layout, see `Buckets.of`."""

    def __init__(self, prefixes: Sequence[bytes], slots: Sequence[int]) -> None:
        """All prefixes have the same length."""
        self.prefixes = tuple(prefixes)
        self.slots = tuple(slots)
        self._prefix_len = len(prefixes[0])
        key_len = self._prefix_len + HASH_BYTES
        self._head = f"${key_len}\r\n".encode()
        rows = [self._head + prefix + bytes(HASH_BYTES) + b"\r\n" for prefix in prefixes]
        self._rows = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)  # [num_buckets, row bytes]

    @classmethod
    def of(cls, redis: RedisClient) -> Buckets:
        """The layout for a server or a cluster."""
        return cls.cluster() if redis.is_cluster else cls.single()

    @classmethod
    def single(cls) -> Buckets:
        """The key layout for a single server."""
        return cls([b"b:"], [0])

    @classmethod
    def cluster(cls) -> Buckets:
        """Tags whose slots are nearest to the middles of 128 equal ranges."""
        tags = ["".join(letters).encode() for letters in product(ascii_letters + digits, repeat=2)]
        slots = np.array([slot_of(tag) for tag in tags])
        width = NUM_SLOTS // NUM_CLUSTER_BUCKETS
        nearest = [int(np.abs(slots - (i * width + width // 2)).argmin()) for i in range(NUM_CLUSTER_BUCKETS)]
        return cls([b"{" + tags[i] + b"}" for i in nearest], [int(slots[i]) for i in nearest])

    def hash_of(self, key: bytes) -> bytes | None:
        """The block hash in a key; None if the key does not belong to a block."""
        is_block = len(key) == self._prefix_len + HASH_BYTES and key[: self._prefix_len] in self.prefixes
        return key[self._prefix_len :] if is_block else None

    def parts(self, hashes: bytes, max_hashes: int) -> Iterator[Part]:
        """The blocks by bucket, at most `max_hashes` (of 16 bytes) in each part, in their order within a bucket."""
        rows, order, bounds = self._sorted(hashes)
        ordered = rows.tobytes() if order is None else rows[order].tobytes()
        for bucket, first, end in bounds:
            for start in range(first, end, max_hashes):
                stop = min(end, start + max_hashes)
                yield Part(bucket, ordered[start * HASH_BYTES : stop * HASH_BYTES])

    def read(self, hashes: bytes, version_key: bytes) -> Read:
        """The commands that read the index's version and every block's holders."""
        rows, order, bounds = self._sorted(hashes)
        numbers = 0 if order is None else rows[order, 0] % len(self.prefixes)
        packed = np.empty((len(rows), self._rows.shape[1]), np.uint8)
        packed[:] = self._rows[numbers]
        start = len(self._head) + self._prefix_len
        packed[:, start : start + HASH_BYTES] = rows if order is None else rows[order]
        size, keys = packed.shape[1], packed.tobytes()
        version = b"$%d\r\n%b\r\n" % (len(version_key), version_key)
        if order is None:
            mget = b"*%d\r\n$4\r\nMGET\r\n%b%b" % (len(rows) + 2, version, keys)
            return Read((Command(mget),), None)
        commands = [Command(b"*2\r\n$3\r\nGET\r\n" + version, slot_of(_tag(version_key)))]
        for bucket, first, end in bounds:
            mget = b"*%d\r\n$4\r\nMGET\r\n%b" % (end - first + 1, keys[first * size : end * size])
            commands.append(Command(mget, self.slots[bucket]))
        return Read(tuple(commands), order)

    def _sorted(self, hashes: bytes) -> tuple[NDArray[np.uint8], NDArray[np.intp] | None, list[tuple[int, int, int]]]:
        """[num_hashes, 16], their order by bucket (None: one bucket), and (bucket, first, end) in that order."""
        rows = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
        if len(self.prefixes) == 1:
            return rows, None, [(0, 0, len(rows))] if len(rows) else []
        numbers = rows[:, 0] % len(self.prefixes)
        order = np.argsort(numbers, kind="stable")
        ends = np.cumsum(np.bincount(numbers, minlength=len(self.prefixes))).tolist()
        firsts = [0, *ends[:-1]]
        return (
            rows,
            order,
            [(i, first, end) for i, (first, end) in enumerate(zip(firsts, ends, strict=True)) if end > first],
        )


@dataclass(frozen=True, slots=True)
class Read:
    """Commands of one match."""

    commands: tuple[Command, ...]
    order: NDArray[np.intp] | None

    def collect(self, replies: list[Any]) -> tuple[bytes | None, list[bytes | None]]:
        """The version, and each block's holders in the order of the chain."""
        if self.order is None:
            version, *values = replies[0]
            return version, values
        found = [value for reply in replies[1:] for value in reply]
        values = [None] * len(found)
        for position, value in zip(self.order.tolist(), found, strict=True):
            values[position] = value
        return replies[0], values


def _tag(key: bytes) -> bytes:
    return key[key.index(b"{") + 1 : key.index(b"}")]


TABLE_SLOT = slot_of(TABLE_TAG)


class RedisIndex:
    """`BlockIndex` over a RedisClient, which it does not own."""

    def __init__(self, redis: RedisClient) -> None:
        """No I/O before `start()`."""
        self._redis = redis
        self._buckets = Buckets.of(redis)
        self._table: HolderTable | None = None
        self._reading_table = asyncio.Lock()

    async def start(self) -> None:
        """See BlockIndex."""
        await self._redis.check()

    async def close(self) -> None:
        """See BlockIndex. The client stays open: it is shared with the sweeper."""
        self._table = None

    async def match(self, hashes: bytes, *, scattered: bool = False) -> PrefixMatch:
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
                return table.scattered(values) if scattered else table.prefix(values)
        raise StoreUnavailable(f"the index at {self._redis.address} was emptied while it was read")

    async def publish(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = UNSTAMPED) -> int:
        """See BlockIndex."""
        holder_id = await self._admit(worker, tier, stamp, register=True)
        return await self._write(PUBLISH, hashes, holder_id) if holder_id is not None else 0

    async def remove(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = UNSTAMPED) -> int:
        """See BlockIndex."""
        holder_id = await self._admit(worker, tier, stamp, register=False)
        return await self._write(REMOVE, hashes, holder_id) if holder_id is not None else 0

    async def stats(self) -> IndexStats:
        """See BlockIndex. All keys of the database but the bookkeeping and the records are blocks."""
        num_keys, used_bytes = 0, 0
        for node in await self._redis.nodes():
            size, info = replies_of(
                node, await node.ask((Command.of("DBSIZE"), Command.of("INFO", "memory")), RedisConnection.READ)
            )
            num_keys += size
            used_bytes += int(info_fields(info)["used_memory"])
        commands = [Command.of("EXISTS", *TABLE_KEYS, slot=TABLE_SLOT), count_command(), *self._markers("EXISTS")]
        num_bookkeeping = sum(await self._redis.call(*commands, connection=RedisConnection.READ))
        num_blocks = max(0, num_keys - num_bookkeeping)  # bookkeeping that began between the two reads is no block
        return IndexStats(num_blocks, used_bytes, self._redis.address)

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
