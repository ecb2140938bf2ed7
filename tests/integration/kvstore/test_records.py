"""Every implementation of `Records` by one suite: in memory, in Redis, and a KV store's over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from services.kvstore.index.redis_index import RedisIndex
from services.kvstore.record_service import RedisRecords
from services.kvstore.resp.client import RedisClient
from services.kvstore.server import KVStoreServer
from services.kvstore.settings import KVStoreSettings, RecordSettings
from shared.errors import InvalidRequest, StoreUnavailable
from shared.records.client import KVStoreRecords
from shared.records.records import (
    ALWAYS,
    MAX_KEYS,
    MAX_RECORD_BYTES,
    STAMP_BYTES,
    Bounds,
    MemoryRecords,
    Records,
    Unless,
)
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc
from shared.rpc.server import channel
from tests.integration.kvstore.test_cluster import client as cluster_client  # noqa: F401
from tests.integration.kvstore.test_cluster import cluster  # noqa: F401
from tests.waiting import DEADLINE_S, until

TENANT_BYTES = 1 << 16
BOUNDS = Bounds(total_bytes=3 * TENANT_BYTES // 2, tenant_bytes=TENANT_BYTES)
TTL_S = 1000.0


@pytest_asyncio.fixture
async def server(valkey_url: str, admin: Redis) -> AsyncIterator[KVStoreServer]:
    bounds = RecordSettings(max_bytes=BOUNDS.total_bytes, tenant_bytes=BOUNDS.tenant_bytes)
    server = KVStoreServer(KVStoreSettings(bind="127.0.0.1:0", redis_url=valkey_url, redis_timeout_s=5, records=bounds))
    await server.start()
    yield server
    await server.close()


@pytest_asyncio.fixture
async def grpc_records(server: KVStoreServer) -> AsyncIterator[Records]:
    client = KVStoreRecords(server.address)
    yield client
    await client.close()


@pytest.fixture
def redis_records(client: RedisClient) -> Records:
    return StampedRecords(client)


@pytest.fixture
def cluster_records(cluster_client: RedisClient) -> Records:  # noqa: F811
    return StampedRecords(cluster_client)


@pytest.fixture
def memory_records() -> Records:
    return MemoryRecords(BOUNDS)


@pytest.fixture(params=["memory", "redis", "grpc", "cluster"])
def records(request: pytest.FixtureRequest) -> Records:
    found: Records = request.getfixturevalue(f"{request.param}_records")
    return found


class StampedRecords(RedisRecords):
    """Draws stamps, as the client of the service does."""

    def __init__(self, redis: RedisClient) -> None:
        super().__init__(redis, BOUNDS)
        self._number = 0

    async def put(
        self, tenant: str, key: str, value: bytes, ttl_s: float, unless: Unless = ALWAYS, stamp: bytes = b""
    ) -> bytes | None:
        self._number += 1
        return await super().put(tenant, key, value, ttl_s, unless, stamp or b"%016d" % self._number)


async def test_a_record_is_read_as_it_was_written_and_by_its_tenant_alone(records: Records) -> None:
    value = bytes(range(256)) * 3
    stamp = await records.put("a", "k", value, TTL_S)
    assert stamp is not None
    assert len(stamp) == STAMP_BYTES
    missing, found = await records.get("a", ["none", "k"])
    assert missing is None
    assert found is not None
    assert (found.key, found.stamp, found.value) == ("k", stamp, value)
    assert await records.get("b", ["k"]) == [None]
    assert await records.delete("b", ["k"]) == 0
    assert await records.delete("a", ["k", "none"]) == 1
    assert await records.get("a", ["k"]) == [None]
    assert await records.get("a", []) == []


async def test_a_write_with_a_condition_happens_where_that_holds(records: Records) -> None:
    first = await records.put("a", "k", b"1", TTL_S, Unless(exists=True))
    assert first is not None
    assert await records.put("a", "k", b"2", TTL_S, Unless(exists=True)) is None
    second = await records.put("a", "k", b"2", TTL_S, Unless(changed_from=first))
    assert second is not None
    assert await records.put("a", "k", b"3", TTL_S, Unless(changed_from=first)) is None
    assert await records.put("a", "gone", b"3", TTL_S, Unless(changed_from=first)) is None
    [found] = await records.get("a", ["k"])
    assert found is not None
    assert found.value == b"2"


async def test_of_many_that_change_a_record_at_once_none_is_lost(records: Records) -> None:
    await records.put("a", "k", b"", TTL_S)

    async def append(letter: bytes) -> None:
        while True:
            [found] = await records.get("a", ["k"])
            assert found is not None
            if await records.put("a", "k", found.value + letter, TTL_S, Unless(changed_from=found.stamp)):
                return

    letters = [bytes([ord("a") + i]) for i in range(12)]
    await asyncio.gather(*map(append, letters))
    [found] = await records.get("a", ["k"])
    assert found is not None
    assert sorted(found.value) == sorted(b"".join(letters))


async def test_what_was_used_longest_ago_makes_room_within_the_tenant_and_for_all(records: Records) -> None:
    value = bytes(20_000)
    for i, key in enumerate(("k0", "k1", "k2")):
        await records.put("a", key, value, TTL_S + 10 * i)
    await records.get("a", ["k0"], TTL_S + 100)  # used: k1 is the oldest now
    await records.put("a", "k3", value, TTL_S + 50)
    found = await records.get("a", ["k0", "k1", "k2", "k3"])
    assert [record is not None for record in found] == [True, False, True, True]
    await records.put("b", "k", value, TTL_S + 60)
    await records.put("b", "l", value, TTL_S + 70)  # 100,000 bytes in all: k2 goes, although it is another tenant's
    found = await records.get("a", ["k0", "k2", "k3"])
    assert [record is not None for record in found] == [True, False, True]
    assert None not in await records.get("b", ["k", "l"])


async def test_what_ends_soon_and_was_used_last_does_not_make_room(records: Records) -> None:
    value = bytes(30_000)
    await records.put("a", "lease", b"1", TTL_S / 10)
    await records.put("a", "k0", value, TTL_S)
    assert await records.get("a", ["lease"], TTL_S / 10) != [None]
    await records.put("a", "k1", value, TTL_S)
    await records.put("a", "k2", value, TTL_S)
    found = await records.get("a", ["lease", "k0", "k1", "k2"])
    assert [record is not None for record in found] == [True, False, True, True]
    await records.get("a", ["lease"], TTL_S / 10)
    await records.put("b", "k", value, TTL_S)
    await records.put("b", "l", value, TTL_S)  # more than all may take: k1 goes
    found = await records.get("a", ["lease", "k1", "k2"])
    assert [record is not None for record in found] == [True, False, True]


async def test_a_record_ends_when_its_time_is_over(records: Records) -> None:
    await records.put("a", "short", b"x", 1.0)
    await records.put("a", "touched", b"x", 1.0)
    await records.get("a", ["touched"], TTL_S)

    async def ended() -> bool:
        return await records.get("a", ["short"]) == [None]

    await until(ended)
    assert await records.get("a", ["touched"]) != [None]
    assert await records.put("a", "short", b"y", TTL_S, Unless(exists=True)) is not None


async def test_what_breaks_a_limit_is_refused_by_name(records: Records) -> None:
    for tenant, keys, field in (
        ("", ["k"], "tenant"),
        ("a\0b", ["k"], "tenant"),
        ("a", ["k" * 257], "key"),
        ("a", ["a\0b"], "key"),
        ("a", [""], "key"),
        ("a", ["k"] * (MAX_KEYS + 1), "keys"),
    ):
        for work in (records.get(tenant, keys), records.delete(tenant, keys)):
            with pytest.raises(InvalidRequest) as caught:
                await work
            assert caught.value.field == field
    for size in (TENANT_BYTES + 1, MAX_RECORD_BYTES + 1):
        with pytest.raises(InvalidRequest) as caught:
            await records.put("a", "k", bytes(size), TTL_S)
        assert caught.value.field == "value"


async def test_records_are_no_blocks_and_leave_nothing_behind(
    client: RedisClient, index: RedisIndex, admin: Redis
) -> None:
    records = StampedRecords(client)
    for tenant in ("a", "b", "c"):
        await records.put(tenant, "k", b"x", TTL_S)
    assert (await index.stats()).num_blocks == 0
    assert await admin.hget("tandem:{records}:used", "") == b"%d" % (3 * (STAMP_BYTES + 2))
    for tenant in ("a", "b", "c"):
        await records.delete(tenant, ["k"])
    assert await admin.keys("tandem:{records}:*") == [b"tandem:{records}:used"]
    assert await admin.hgetall("tandem:{records}:used") == {b"": b"0"}
    assert (await index.stats()).num_blocks == 0


async def test_a_repeated_write_is_one_write(client: RedisClient) -> None:
    records, stamp = RedisRecords(client, BOUNDS), b"s" * STAMP_BYTES
    for _ in range(2):
        assert await records.put("a", "k", b"x", TTL_S, Unless(exists=True), stamp) == stamp


async def test_hostile_calls_get_typed_errors(server: KVStoreServer) -> None:
    good = {"tenant": "a", "key": "k", "value": b"x", "stamp": bytes(STAMP_BYTES), "ttl_s": 1.0}
    async with channel(server.address) as connection:
        stub = kvstore_pb2_grpc.RecordServiceStub(connection)
        for change in ({"stamp": b""}, {"if_stamp": b"x"}, {"ttl_s": float("nan")}, {"ttl_s": 1e12}, {"ttl_s": 0.0}):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.PutRecord(kvstore_pb2.PutRecordRequest(**{**good, **change}), timeout=DEADLINE_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = stub.GetRecords(kvstore_pb2.GetRecordsRequest(tenant="a", keys=["k"], ttl_s=-1), timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_store_that_is_not_there_is_unavailable() -> None:
    records = KVStoreRecords("127.0.0.1:1")
    for work in (records.get("a", ["k"]), records.put("a", "k", b"", TTL_S), records.delete("a", ["k"])):
        with pytest.raises(StoreUnavailable):
            await work
    await records.close()
