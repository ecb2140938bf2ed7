"""Orders between services need an identity: fetch, flush and drain from strangers are refused, and change nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from services.worker.session import SessionServer
from shared.block_service.client import BlockClient, SentBlock
from shared.block_service.servicer import BlockServicer
from shared.errors import Unauthenticated
from shared.identity import DECODE, PREFILL
from shared.kv.fleet_key import FleetKey
from shared.kv_index.holders import Tier
from shared.rpc.fleet_identity import FleetGuard, fleet_metadata
from shared.rpc.pb.tandem.v1 import kvstore_pb2_grpc, types_pb2, worker_pb2
from shared.rpc.server import RpcServer
from shared.rpc.tls import Tls
from tests.integration.test_service_tls import authority  # noqa: F401
from tests.integration.worker.session_rig import Router, serving
from tests.waiting import DEADLINE_S

TOKEN = FleetKey(b"the secret of this fleet").token()
STRANGERS = ["", FleetKey(b"the secret of another").token(), TOKEN[:-1]]
NAME = b"0123456789abcdef"


class Provider:
    """Counts what it was asked for."""

    def __init__(self) -> None:
        self.num_flushed = self.num_fetched = 0

    async def look_up(self, hashes):
        return [True for _ in hashes]

    async def fetch(self, hashes, block_bytes, ticket, address):
        self.num_fetched += 1
        yield [SentBlock(0, 1, Tier.DEVICE)]

    async def flush(self, tenant):
        self.num_flushed += 1
        return 1, 2


@contextlib.asynccontextmanager
async def provider(credentials=None) -> AsyncIterator[tuple[Provider, str]]:
    made = Provider()
    servicer = BlockServicer(made, FleetGuard(TOKEN))
    server = RpcServer(
        "127.0.0.1:0",
        lambda server: kvstore_pb2_grpc.add_BlockServiceServicer_to_server(servicer, server),
        (),
        credentials=credentials,
    )
    await server.start()
    try:
        yield made, server.address
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def connected(address: str, **options) -> AsyncIterator[BlockClient]:
    client = BlockClient(address, **options)
    try:
        yield client
    finally:
        await client.close()


async def fetched(client: BlockClient) -> list:
    return [part async for part in client.fetch([NAME], 8, 1, b"address", 5.0)]


@pytest.mark.parametrize("token", STRANGERS, ids=["none", "another", "cut"])
async def test_a_stranger_neither_fetches_nor_flushes(token):
    async with provider() as (asked, address), connected(address, token=token) as client:
        with pytest.raises(Unauthenticated):
            await fetched(client)
        with pytest.raises(Unauthenticated):
            await client.flush(None, DEADLINE_S)
        assert (asked.num_fetched, asked.num_flushed) == (0, 0)


async def test_a_service_with_the_key_does_both():
    async with provider() as (asked, address), connected(address, token=TOKEN) as client:
        assert len(await fetched(client)) == 1
        assert (await client.flush(None, DEADLINE_S)).num_blocks == 1
        assert (asked.num_fetched, asked.num_flushed) == (1, 1)


async def test_a_certificate_of_the_fleet_is_an_identity_too(authority):  # noqa: F811
    server, own = (Tls.model_validate(authority.settings(name)) for name in ("kvstore", "worker"))
    async with (
        provider(server.server_credentials()) as (asked, address),
        connected(address, credentials=own.channel_credentials()) as client,
    ):
        await client.flush(None, DEADLINE_S)
        assert asked.num_flushed == 1


@pytest.mark.parametrize("kind", [PREFILL, DECODE])
@pytest.mark.parametrize("token", STRANGERS, ids=["none", "another", "cut"])
@pytest.mark.parametrize("undo", [False, True])
async def test_a_stranger_does_not_drain_a_worker_nor_undo_it(kind, token, undo):
    async with serving(kind, guard=FleetGuard(TOKEN)) as worker:
        if undo:
            worker.worker.drain()
        async with Router(worker, fleet_metadata(token)) as router:
            await router.send(**({"undrain": types_pb2.Undrain()} if undo else {"drain": types_pb2.Drain()}))
            await router.ended()
            assert await router.call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert worker.worker.load.draining == undo


class Slow:
    """A stream that is still writing when a stranger's order is refused."""

    def __init__(self, context) -> None:
        self._context = context
        self._refused = asyncio.Event()
        self.num_writing = 0
        self.num_writing_at_abort: int | None = None

    def __getattr__(self, name):
        return getattr(self._context, name)

    def invocation_metadata(self):
        self._refused.set()
        return self._context.invocation_metadata()

    async def write(self, events: bytes) -> None:
        self.num_writing += 1
        await self._context.write(events)
        if any(event.HasField("heartbeat") for event in worker_pb2.Events.FromString(events).events):
            await self._refused.wait()
            for _ in range(10):
                await asyncio.sleep(0)
        self.num_writing -= 1

    async def abort(self, *how):
        self.num_writing_at_abort = self.num_writing
        await self._context.abort(*how)


async def test_a_stranger_is_refused_once_nothing_is_on_its_way_out(monkeypatch):
    """gRPC now and then never ends a stream that is refused while a message is written to it."""
    streams = []
    serve = SessionServer.serve

    async def slowly(self, context):
        streams.append(Slow(context))
        await serve(self, streams[-1])

    monkeypatch.setattr(SessionServer, "serve", slowly)
    async with serving(PREFILL, guard=FleetGuard(TOKEN)) as worker, Router(worker, heartbeat_ms=50) as router:
        await router.event("heartbeat")
        await router.send(drain=types_pb2.Drain())
        await router.ended()
        assert await router.call.code() is grpc.StatusCode.UNAUTHENTICATED
    (stream,) = streams
    assert stream.num_writing_at_abort == 0


async def test_a_service_with_the_key_drains_a_worker():
    async with (
        serving(DECODE, guard=FleetGuard(TOKEN)) as worker,
        Router(worker, fleet_metadata(TOKEN)) as router,
    ):
        await router.send(drain=types_pb2.Drain())
        while not (await router.event("load")).load.draining:
            pass
        assert worker.worker.load.draining


def test_a_guard_shows_no_token():
    assert TOKEN not in repr(FleetGuard(TOKEN))
