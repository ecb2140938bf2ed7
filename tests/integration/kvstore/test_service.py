"""The service over real gRPC: what clients see, refused input, health, and Redis going away and coming back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from redis.asyncio import Redis

from services.kvstore.embedded import EmbeddedValkey
from services.kvstore.requests import MAX_NAME_BYTES
from services.kvstore.server import KVStoreServer
from services.kvstore.servicer import SERVICE_NAME
from services.kvstore.settings import KVStoreSettings
from shared.errors import ConfigError, InvalidRequest, StoreUnavailable
from shared.identity import WorkerRole
from shared.kv_index.client import KVStoreClient
from shared.kv_index.holders import MAX_HASHES, PrefixMatch, Tier
from shared.kv_index.publisher import IndexPublisher
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc, types_pb2
from shared.rpc.server import channel
from tests.integration.kvstore.workers import hashes, holder, worker
from tests.waiting import DEADLINE_S, until

A = worker("prefill-0", 2**64 - 1)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def settings(url: str, **changes: Any) -> KVStoreSettings:
    return KVStoreSettings(**{"bind": "127.0.0.1:0", "redis_url": url, "redis_timeout_s": 2.0, **changes})


@pytest_asyncio.fixture
async def server(valkey_url: str, admin: Redis) -> AsyncIterator[KVStoreServer]:
    server = KVStoreServer(settings(valkey_url))
    await server.start()
    yield server
    await server.close()


@pytest_asyncio.fixture
async def store(server: KVStoreServer) -> AsyncIterator[KVStoreClient]:
    client = KVStoreClient(server.address, match_timeout_s=5.0, write_timeout_s=5.0)
    yield client
    await client.close()


async def test_publish_match_remove_and_stats(store: KVStoreClient) -> None:
    chain = hashes(5)
    await store.publish(A, chain[:4])
    await store.publish(worker("decode-0", 3, WorkerRole.DECODE), chain[:2], Tier.HOST)
    match = await store.match(chain)
    both = (holder(A), holder(worker("decode-0", 3, WorkerRole.DECODE), Tier.HOST))
    assert match == PrefixMatch((both, both, (holder(A),), (holder(A),)))
    await store.remove(A, chain[1:])
    assert (await store.match(chain)).num_blocks == 2
    stats = await store.stats()
    assert (stats.num_blocks, stats.num_match_requests, stats.num_match_blocks, stats.num_hit_blocks) == (2, 2, 10, 6)


async def test_a_new_incarnation_ends_the_old_one(store: KVStoreClient) -> None:
    chain = hashes(2)
    await store.publish(A, chain)
    await store.publish(worker(A.name, 1), [])
    assert (await store.match(chain)).num_blocks == 0
    with pytest.raises(InvalidRequest, match="superseded") as caught:
        await store.publish(A, chain)
    assert caught.value.field == "worker.incarnation"


def identified(**changes: Any) -> dict[str, Any]:
    return {"worker": types_pb2.WorkerId(name="w", incarnation=1), "tier": 1, "block_hashes": bytes(16), **changes}


@pytest.mark.parametrize(
    ("message", "field", "limit"),
    [
        (kvstore_pb2.MatchRequest(block_hashes=bytes(15)), "block_hashes", "16"),
        (kvstore_pb2.MatchRequest(block_hashes=bytes(16 * (MAX_HASHES + 1))), "block_hashes", str(MAX_HASHES)),
        (kvstore_pb2.PublishRequest(**identified(role=1, block_hashes=bytes(17))), "block_hashes", "16"),
        (kvstore_pb2.PublishRequest(**identified(role=1, worker=None)), "worker.name", "1"),
        (
            kvstore_pb2.PublishRequest(
                **identified(role=1, worker=types_pb2.WorkerId(name="ü" * MAX_NAME_BYTES, incarnation=1))
            ),
            "worker.name",
            str(MAX_NAME_BYTES),
        ),
        (
            kvstore_pb2.PublishRequest(**identified(role=1, worker=types_pb2.WorkerId(name="w"))),
            "worker.incarnation",
            "1",
        ),
        (kvstore_pb2.PublishRequest(**identified(role=1, tier=0)), "tier", None),
        (kvstore_pb2.PublishRequest(**identified(role=0)), "role", None),
        (kvstore_pb2.RemoveRequest(**identified(tier=0)), "tier", None),
        (kvstore_pb2.RemoveRequest(**identified(worker=None)), "worker.name", "1"),
    ],
)
async def test_malformed_requests_are_refused_naming_field_and_limit(
    server: KVStoreServer, message: Any, field: str, limit: str | None
) -> None:
    async with channel(server.address) as connection:
        stub = kvstore_pb2_grpc.KVStoreServiceStub(connection)
        method = getattr(stub, type(message).__name__.removesuffix("Request"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(message, timeout=DEADLINE_S)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    trailers = dict(caught.value.trailing_metadata() or ())
    error = types_pb2.Error.FromString(trailers["tandem-error-bin"])
    assert error.kind == "InvalidRequest"
    assert error.details["field"] == field
    assert error.details.get("limit") == limit
    assert field.removeprefix("worker.") in (caught.value.details() or "")


async def test_the_client_refuses_a_hash_of_another_length(store: KVStoreClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await store.match([bytes(15), bytes(17)])
    assert caught.value.field == "block_hashes"


async def test_health_and_reflection_name_the_service(server: KVStoreServer) -> None:
    async with channel(server.address) as connection:
        health = health_pb2_grpc.HealthStub(connection)
        for name in ("", SERVICE_NAME):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S)
            assert answer.status == SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(connection)
        listing = reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=DEADLINE_S
        )
        async for answer in listing:
            assert SERVICE_NAME in {service.name for service in answer.list_services_response.service}


async def test_a_taken_port_is_a_config_error(server: KVStoreServer, valkey_url: str) -> None:
    second = KVStoreServer(settings(valkey_url, bind=server.address))
    with pytest.raises(ConfigError) as caught:
        await second.start()
    assert caught.value.field == "bind"
    await second.close()


async def test_no_server_at_all_is_unavailable_within_the_timeout() -> None:
    client = KVStoreClient("127.0.0.1:9", match_timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await client.match(hashes(1))
    assert time.monotonic() - started < DEADLINE_S
    await client.close()
    await client.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await client.match(hashes(1))


async def health_is(status: int, watch: Any) -> None:
    """Reads a health Watch stream up to `status`."""
    async with asyncio.timeout(DEADLINE_S):
        async for answer in watch:
            if answer.status == status:
                return
    raise AssertionError("the health stream ended")


async def test_redis_dies_and_comes_back(tmp_path: Path) -> None:
    """Refused at once in between, told by health, and nobody has to restart the store or its clients."""
    redis = EmbeddedValkey(tmp_path)
    await redis.start()
    server = KVStoreServer(settings(redis.url, redis_timeout_s=2.0), probe_interval_s=0.05)
    await server.start()
    client = KVStoreClient(server.address, match_timeout_s=DEADLINE_S)
    publisher = IndexPublisher(client, A, flush_interval_s=0.001)
    await publisher.start()
    chain = hashes(3)
    async with channel(server.address) as connection:
        watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        await health_is(SERVING, watch)
        await client.publish(A, chain)
        assert redis.pid is not None
        os.kill(redis.pid, signal.SIGKILL)
        await health_is(NOT_SERVING, watch)
        for call in (client.match(chain), client.publish(A, chain), client.remove(A, chain), client.stats()):
            with pytest.raises(StoreUnavailable, match="Redis"):  # Redis's refusal, not the client's own time-out
                await call
        publisher.offer(sealed=chain, evicted=())
        await until(lambda: _is(not publisher.available))
        await redis.stop()
        await redis.start()
        await health_is(SERVING, watch)
        await until(lambda: _found(client, chain))
        assert publisher.available
        watch.cancel()
    await publisher.close()
    await client.close()
    await server.close()
    await redis.stop()


async def test_a_store_started_before_its_redis_serves_once_it_is_there(tmp_path: Path) -> None:
    redis = EmbeddedValkey(tmp_path)
    server = KVStoreServer(settings(redis.url), probe_interval_s=0.05)
    await server.start()
    client = KVStoreClient(server.address, match_timeout_s=5.0)
    async with channel(server.address) as connection:
        watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest())
        await health_is(NOT_SERVING, watch)
        with pytest.raises(StoreUnavailable):
            await client.match(hashes(1))
        await redis.start()
        await health_is(SERVING, watch)
        assert (await client.match(hashes(1))).num_blocks == 0
        watch.cancel()
    await client.close()
    await server.close()
    await redis.stop()


async def _is(value: bool) -> bool:
    return value


async def _found(client: KVStoreClient, chain: list[bytes]) -> bool:
    with contextlib.suppress(StoreUnavailable):
        return (await client.match(chain)).num_blocks == len(chain)
    return False
