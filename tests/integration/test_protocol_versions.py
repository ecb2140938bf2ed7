"""A router and a worker of different session protocols refuse each other, and say which version each speaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import grpc
import grpc.aio
import pytest

from services.router.placement.views import Pool
from services.router.workers import sessions
from services.router.workers.discovery import DiscoveredWorker
from services.router.workers.link import WorkerLink
from services.router.workers.sessions import Greeting, greet
from services.router.workers.worker_stream import SessionCall
from shared.errors import ModelMismatch
from shared.identity import BOTH, DECODE, WorkerRole
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.rpc.protocol import OLD_SESSION_SERVICES, PROTOCOL_VERSION, SESSION_METHOD, SESSION_SERVICE
from shared.rpc.server import RpcServer, channel
from shared.seeds import SAMPLER_VERSION
from tests.integration.worker.session_rig import Router, serving
from tests.waiting import until


@pytest.mark.parametrize("service", OLD_SESSION_SERVICES)
async def test_a_router_of_protocol_1_gets_a_typed_error(service):
    """It opens the session of a role, whose commands this build does not know."""
    async with serving(BOTH) as worker, channel(worker.rpc.address) as link:
        call = link.stream_stream(f"/{service}/Session")()
        await call.write(types_pb2.Hello(router_name="r", protocol_version=1).SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = from_rpc_error(refused.value, "worker w")
        assert isinstance(error, ModelMismatch)
        assert error.field == "protocol_version"
        assert "session protocol 1," in error.message
        assert f"speaks {PROTOCOL_VERSION}:" in error.message


async def test_a_router_of_protocol_1_is_refused_once_it_has_written():
    """An end before that would fail its write, and gRPC would put an error of its own in the place of the typed one."""
    path = f"/{OLD_SESSION_SERVICES[0]}/Session"
    hello = types_pb2.Hello(router_name="r", protocol_version=1).SerializeToString()
    async with serving(BOTH) as worker, channel(worker.rpc.address) as link:
        slow, other = link.stream_stream(path)(), link.stream_stream(path)()
        await other.write(hello)
        assert await other.code() is grpc.StatusCode.FAILED_PRECONDITION  # by then the first call is there, too
        assert not slow.done()
        await slow.write(hello)
        assert await slow.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("version", [0, SAMPLER_VERSION + 1])
async def test_a_router_of_another_sampler_gets_a_typed_error(version):
    async with serving(BOTH) as worker:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with Router(worker, sampler_version=version):
                pass
        error = from_rpc_error(refused.value, "worker w")
        assert (type(error), error.field) == (ModelMismatch, "sampler_version")
        assert f"sampler version {version or 1}, this worker has {SAMPLER_VERSION}" in error.message


async def test_a_router_of_a_later_protocol_gets_a_typed_error():
    async with serving(BOTH) as worker:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with Router(worker, protocol_version=PROTOCOL_VERSION + 1):
                pass
        assert isinstance(from_rpc_error(refused.value, "worker w"), ModelMismatch)


@contextlib.asynccontextmanager
async def other_worker(service: str, welcome: types_pb2.Welcome) -> AsyncIterator[str]:
    """The address of a worker that serves sessions as another build does."""

    async def session(_, context) -> None:
        await context.read()
        envelope = worker_pb2.Events(events=[worker_pb2.Event(welcome=welcome)])
        await context.write(envelope.SerializeToString())

    handler = grpc.stream_stream_rpc_method_handler(session, None, None)
    handlers = grpc.method_handlers_generic_handler(service, {"Session": handler})
    server = RpcServer("127.0.0.1:0", lambda server: server.add_generic_rpc_handlers((handlers,)), ())
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0.0)


PROTOCOL_1 = types_pb2.Welcome(protocol_version=1)
LATER_PROTOCOL = types_pb2.Welcome(protocol_version=PROTOCOL_VERSION + 1)
FIRST_SAMPLER = types_pb2.Welcome(protocol_version=PROTOCOL_VERSION)
LATER_SAMPLER = types_pb2.Welcome(protocol_version=PROTOCOL_VERSION, sampler_version=SAMPLER_VERSION + 1)


@pytest.mark.parametrize(
    ("service", "welcome", "found"),
    [
        (OLD_SESSION_SERVICES[1], PROTOCOL_1, f"speaks session protocol 1, this router speaks {PROTOCOL_VERSION}"),
        (SESSION_SERVICE, LATER_PROTOCOL, f"speaks session protocol {PROTOCOL_VERSION + 1}, this router"),
        (SESSION_SERVICE, FIRST_SAMPLER, f"has sampler version 1, this router has {SAMPLER_VERSION}"),
        (SESSION_SERVICE, LATER_SAMPLER, f"has sampler version {SAMPLER_VERSION + 1}, this router"),
    ],
)
async def test_a_router_says_that_a_worker_is_of_another_version(service, welcome, found):
    pool = Pool()
    async with other_worker(service, welcome) as address:
        worker = DiscoveredWorker("d0", DECODE, address)
        link = WorkerLink(worker, Greeting("router-0"), lambda _: None, lambda: None, {WorkerRole.DECODE: pool})
        running = asyncio.create_task(link.run())
        await until(lambda: link.mismatch)
        running.cancel()
        await asyncio.wait({running})
    assert f"worker d0 {found}" in link.mismatch
    assert len(pool) == 0


class CrossedCall:
    """A call whose refusal came while the hello was being written."""

    async def write(self, hello: bytes) -> None:
        assert hello == b"hello"
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata())


async def greeting(address: str) -> None:
    """What a hello that crosses a refusal comes to, at a worker of that address."""
    async with channel(address) as connection:
        opened = connection.stream_stream(SESSION_METHOD, None, worker_pb2.Events.FromString)
        await greet("d0", cast("SessionCall", CrossedCall()), b"hello", opened)


async def test_a_refusal_that_crosses_the_hello_is_a_refusal_all_the_same(monkeypatch):
    monkeypatch.setattr(sessions, "REFUSED_WITHIN_S", 60.0)
    async with other_worker(OLD_SESSION_SERVICES[1], types_pb2.Welcome()) as old:
        with pytest.raises(ModelMismatch, match="worker d0 speaks session protocol 1"):
            await greeting(old)


async def test_an_internal_error_of_a_worker_that_knows_sessions_stays_one(monkeypatch):
    monkeypatch.setattr(sessions, "REFUSED_WITHIN_S", 0.2)
    async with other_worker(SESSION_SERVICE, types_pb2.Welcome()) as worker:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await greeting(worker)
        assert failed.value.code() is grpc.StatusCode.INTERNAL
