"""Mutual TLS between services: who has no certificate of the authority is not talked to, in either direction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from services.router.placement.views import Pool
from services.router.workers.discovery import DiscoveredWorker
from services.router.workers.link import WorkerLink
from services.router.workers.sessions import Greeting
from shared.block_service.client import BlockClient
from shared.errors import ConfigError, StoreUnavailable
from shared.identity import PREFILL, WorkerRole
from shared.kv_index.client import KVStoreClient
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from shared.rpc.server import RpcServer
from shared.rpc.tls import ServiceTls, Tls
from tests.tls_files import Authority
from tests.waiting import DEADLINE_S, until


class Answering(
    kvstore_pb2_grpc.KVStoreServiceServicer,
    kvstore_pb2_grpc.BlockServiceServicer,
    worker_pb2_grpc.WorkerServiceServicer,
):
    """Counts who got through."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.called = asyncio.Event()

    async def Rebuild(self, request, context):  # noqa: N802
        self.num_calls += 1
        return kvstore_pb2.RebuildResponse(num_holders=3)

    async def LookUp(self, request, context):  # noqa: N802
        self.num_calls += 1
        return kvstore_pb2.LookUpResponse(held=b"\1")

    async def Session(self, commands, context):  # noqa: N802
        async for _ in commands:
            self.num_calls += 1
            self.called.set()
            yield worker_pb2.Events(events=[worker_pb2.Event(welcome=types_pb2.Welcome())])

    def register(self, server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KVStoreServiceServicer_to_server(self, server)
        kvstore_pb2_grpc.add_BlockServiceServicer_to_server(self, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def service(authority: Authority) -> AsyncIterator[tuple[str, Answering]]:
    """A service with mutual TLS: its address, and what got through to it."""
    tls = Tls.model_validate(authority.settings("service"))
    tls.check("tls", mutual=True)
    servicer = Answering()
    server = RpcServer("127.0.0.1:0", servicer.register, (), credentials=tls.server_credentials())
    await server.start()
    yield server.address, servicer
    await server.stop(0)


def strangers(authority: Authority, folder: Path) -> list[grpc.ChannelCredentials | None]:
    """Plain text; a certificate of another authority; none at all; a service of ours that trusts another authority."""
    other = Authority(folder, "other")
    forged, own = (Tls.model_validate(each.settings(name)) for each, name in ((other, "worker"), (authority, "own")))
    return [
        None,
        Tls(cert=forged.cert, key=forged.key, ca=authority.cert).channel_credentials(),
        grpc.ssl_channel_credentials(authority.cert.read_bytes()),
        Tls(cert=own.cert, key=own.key, ca=other.cert).channel_credentials(),
    ]


async def test_clients_of_store_and_blocks_get_through_with_a_certificate_only(
    service: tuple[str, Answering], authority: Authority, tmp_path: Path
) -> None:
    address, servicer = service
    own = Tls.model_validate(authority.settings("worker")).channel_credentials()
    store = KVStoreClient(address, write_timeout_s=DEADLINE_S, credentials=own)
    blocks = BlockClient(address, look_up_timeout_s=DEADLINE_S, credentials=own)
    assert await store.rebuild() == 3
    assert await blocks.look_up([b"x" * 16]) == [True]
    await store.close()
    await blocks.close()
    for credentials in strangers(authority, tmp_path):
        store = KVStoreClient(address, write_timeout_s=1, credentials=credentials)
        blocks = BlockClient(address, look_up_timeout_s=1, credentials=credentials)
        with pytest.raises(StoreUnavailable):
            await store.rebuild()
        with pytest.raises(StoreUnavailable):
            await blocks.look_up([b"x" * 16])
        await store.close()
        await blocks.close()
    assert servicer.num_calls == 2


async def test_a_service_is_known_by_its_name_where_addresses_are_not_known_beforehand(authority: Authority) -> None:
    cert, key = authority.issue("pod", "DNS:tandem")
    tls = ServiceTls(cert=cert, key=key, ca=authority.cert, server_name="tandem")
    servicer = Answering()
    server = RpcServer("127.0.0.1:0", servicer.register, (), credentials=tls.server_credentials())
    await server.start()
    for name, gets_through in (("tandem", True), ("", False), ("another", False)):
        credentials = tls.model_copy(update={"server_name": name}).channel_credentials()
        blocks = BlockClient(
            server.address, look_up_timeout_s=DEADLINE_S if gets_through else 1, credentials=credentials
        )
        if gets_through:
            assert await blocks.look_up([b"x" * 16]) == [True]
        else:
            with pytest.raises(StoreUnavailable):
                await blocks.look_up([b"x" * 16])
        await blocks.close()
    await server.stop(0)
    assert servicer.num_calls == 1


async def test_a_routers_session_needs_its_certificate(
    service: tuple[str, Answering], authority: Authority, tmp_path: Path
) -> None:
    address, servicer = service
    pools = {WorkerRole.PREFILL: Pool()}
    worker = DiscoveredWorker("p0", PREFILL, address)

    def link(credentials: grpc.ChannelCredentials | None) -> WorkerLink:
        return WorkerLink(
            worker, Greeting("router-0"), lambda welcome: None, lambda: None, pools, credentials=credentials
        )

    for credentials in strangers(authority, tmp_path):
        refused = link(credentials)
        running = asyncio.create_task(refused.run())
        await until(lambda link=refused: link.mismatch)
        running.cancel()
        await asyncio.wait({running})
    assert servicer.num_calls == 0
    running = asyncio.create_task(link(Tls.model_validate(authority.settings("router")).channel_credentials()).run())
    await asyncio.wait_for(servicer.called.wait(), DEADLINE_S)
    running.cancel()
    await asyncio.wait({running})


async def test_a_services_own_calls_follow_changed_certificates(tmp_path: Path) -> None:
    """Both sides get files of another authority: a session that begins anew, and the next calls, use them."""
    folders = [tmp_path / name for name in ("before", "after")]
    for folder in folders:
        folder.mkdir()
    before, after = map(Authority, folders)
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")}

    def install(of: Authority) -> None:
        for source, file in zip((*of.issue("service"), of.cert), files.values(), strict=True):
            (staged := tmp_path / "staged").write_bytes(source.read_bytes())
            staged.rename(file)

    async def serve(bind: str) -> RpcServer:
        server = RpcServer(bind, servicer.register, (), credentials=tls.server_credentials())
        await server.start()
        return server

    install(before)
    tls = Tls(**files)
    servicer = Answering()
    server = await serve("127.0.0.1:0")
    own = tls.channel_credentials()
    store = KVStoreClient(server.address, write_timeout_s=DEADLINE_S, credentials=own)
    blocks = BlockClient(server.address, look_up_timeout_s=DEADLINE_S, credentials=own)
    worker = DiscoveredWorker("p0", PREFILL, server.address)
    pools = {WorkerRole.PREFILL: Pool()}
    link = WorkerLink(worker, Greeting("router-0"), lambda _: None, lambda: None, pools, credentials=own)
    assert await store.rebuild() == 3
    assert await blocks.look_up([b"x" * 16]) == [True]
    running = asyncio.create_task(link.run())
    await asyncio.wait_for(servicer.called.wait(), DEADLINE_S)
    servicer.called.clear()

    install(after)
    assert await store.rebuild() == 3
    assert await blocks.look_up([b"x" * 16]) == [True]
    await server.stop(0)
    server = await serve(server.address)
    await asyncio.wait_for(servicer.called.wait(), DEADLINE_S)
    assert await store.rebuild() == 3
    running.cancel()
    await asyncio.wait({running})
    for client in (store, blocks):
        await client.close()
    await server.stop(0)


def test_files_that_are_missing_or_do_not_fit_are_named(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("one")
    _, other_key = authority.issue("two")
    text = tmp_path / "text.pem"
    text.write_text("no PEM")
    wrong = [
        (Tls(cert=cert), True, "tls.ca"),
        (Tls(cert=cert, key=key), True, "tls.ca"),
        (Tls(cert=cert), False, "tls.key"),
        (Tls(ca=authority.cert), False, "tls.cert"),
        (Tls(cert=tmp_path / "none.pem", key=key), False, "tls.cert"),
        (Tls(cert=cert, key=other_key), False, "tls.cert"),
        (Tls(cert=text, key=key), False, "tls.cert"),
        (Tls(cert=cert, key=key, ca=text), True, "tls.ca"),
    ]
    for tls, mutual, field in wrong:
        with pytest.raises(ConfigError) as caught:
            tls.check("tls", mutual=mutual)
        assert caught.value.field == field
    Tls().check("tls", mutual=True)
    assert Tls().server_credentials() is None
