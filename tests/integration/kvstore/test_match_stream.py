"""Matches over one stream: each gets its own answer; a store that drains, dies or hangs is noticed in time."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import grpc.aio
import pytest
from redis.asyncio import Redis

from services.kvstore.server import KVStoreServer
from services.kvstore.settings import KVStoreSettings
from shared.errors import InvalidRequest, StoreUnavailable
from shared.kv_index.client import KVStoreClient, MatchStream
from shared.kv_index.holders import MAX_HASHES, join_hashes
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc
from tests.integration.kvstore.test_processes import end_of, event_of, start_store
from tests.integration.kvstore.workers import eventually, hashes, worker
from tests.waiting import DEADLINE_S

A = worker()
CHAIN = hashes(64)
DRAIN_S = 60.0


async def serving(valkey_url: str, bind: str = "127.0.0.1:0") -> KVStoreServer:
    server = KVStoreServer(
        KVStoreSettings(bind=bind, redis_url=valkey_url, redis_timeout_s=2.0, drain_timeout_s=DRAIN_S)  # type: ignore[arg-type]
    )
    await server.start()
    return server


@pytest.mark.usefixtures("admin")
async def test_many_at_a_time_get_each_its_own_answer_or_error(valkey_url: str) -> None:
    server = await serving(valkey_url)
    client = KVStoreClient(server.address, match_timeout_s=10.0, write_timeout_s=10.0)
    await client.publish(A, CHAIN)
    wrong = [bytes(16)] * (MAX_HASHES + 1)
    asked = [client.match(wrong) if n % 16 == 5 else client.match([*CHAIN[:n], bytes(16)]) for n in range(64)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for number, answer in enumerate(answers):
        if number % 16 == 5:
            assert isinstance(answer, InvalidRequest)
            assert answer.field == "block_hashes"
        else:
            assert not isinstance(answer, BaseException)
            assert answer.num_blocks == number
    await client.close()
    await server.close()


@pytest.mark.usefixtures("admin")
async def test_a_drain_does_not_wait_for_open_streams_and_the_client_finds_the_next_store(valkey_url: str) -> None:
    server = await serving(valkey_url)
    client = KVStoreClient(server.address, match_timeout_s=5.0, write_timeout_s=5.0)
    await client.publish(A, CHAIN)
    assert (await client.match(CHAIN)).num_blocks == 64
    async with asyncio.timeout(DRAIN_S / 2):
        await server.close()
    with pytest.raises(StoreUnavailable):
        await client.match(CHAIN)
    server = await serving(valkey_url, bind=server.address)
    await eventually(lambda: _found(client))
    await client.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await client.match(CHAIN)
    await server.close()


async def test_a_store_that_hangs_or_dies_is_told_within_the_timeout(valkey_url: str, admin: Redis) -> None:
    process = await start_store("--bind", "127.0.0.1:0", TANDEM_KVSTORE_REDIS_URL=valkey_url)
    client = KVStoreClient((await event_of(process))["address"], match_timeout_s=0.3, write_timeout_s=5.0)
    await client.publish(A, CHAIN)
    await eventually(lambda: _found(client))
    os.kill(process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="in time"):
        await client.match(CHAIN)
    hanging = [asyncio.create_task(client.match(CHAIN)) for _ in range(3)]
    process.kill()
    for answer in await asyncio.gather(*hanging, return_exceptions=True):
        assert isinstance(answer, StoreUnavailable)
    assert time.monotonic() - started < DEADLINE_S
    await end_of(process)
    await client.close()


@pytest.mark.usefixtures("admin")
async def test_requests_that_end_before_they_are_sent_leave_the_stream_to_the_others(valkey_url: str) -> None:
    process = await start_store("--bind", "127.0.0.1:0", TANDEM_KVSTORE_REDIS_URL=valkey_url)
    try:
        address = (await event_of(process))["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            stub = kvstore_pb2_grpc.KVStoreServiceStub(channel)
            stream = MatchStream(stub.MatchStream(), address, lambda error: StoreUnavailable(str(error)))
            small = kvstore_pb2.MatchRequest(block_hashes=join_hashes(CHAIN))
            await stream.ask(small, DEADLINE_S)
            os.kill(process.pid, signal.SIGSTOP)
            large = kvstore_pb2.MatchRequest(block_hashes=join_hashes(hashes(1) * MAX_HASHES))
            # More than gRPC takes from a sender whose peer reads nothing.
            hasty = [asyncio.create_task(stream.ask(large, 0.3)) for _ in range(32)]
            patient = asyncio.create_task(stream.ask(small, 4 * DEADLINE_S))
            cancelled = asyncio.create_task(stream.ask(large, 4 * DEADLINE_S))
            for ended in await asyncio.gather(*hasty, return_exceptions=True):
                assert isinstance(ended, StoreUnavailable)
                assert "in time" in str(ended)
            cancelled.cancel()
            await asyncio.wait({cancelled})
            os.kill(process.pid, signal.SIGCONT)
            await patient
            assert stream.is_open
            await stream.close()
    finally:
        process.kill()
        await end_of(process)


async def _found(client: KVStoreClient) -> bool:
    return (await client.match(CHAIN)).num_blocks == 64
