"""Routers that the planner reaches by their Pods' addresses: figures, also over TLS, and drains."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp.web
import grpc.aio
import pytest

from services.planner.cluster.pods import Pod
from services.planner.figures.sources import Sources
from services.planner.settings import RouterTlsSettings
from shared.errors import ConfigError, DeadlineExceeded, InvalidRequest, NotFound, TandemError, WorkerLost
from shared.rpc.errors import abort
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from tandem import ClientTls
from tests.tls_files import Authority

NAME = "demo-router.serving.svc"


class Status(inference_pb2_grpc.InferenceServiceServicer):
    async def GetStatus(self, request: Any, context: Any) -> inference_pb2.ClusterStatus:  # noqa: N802
        return inference_pb2.ClusterStatus(queue_len=7)


async def page(_: aiohttp.web.Request) -> aiohttp.web.Response:
    return aiohttp.web.Response(text='tandem_requests_total{outcome="finished"} 3\n')


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def router(authority: Authority) -> AsyncIterator[Pod]:
    """Its certificate has the Service's name alone, not the address."""
    cert, key = authority.issue("router", f"DNS:{NAME}")
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Status(), server)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    grpc_port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(cert, key)
    app = aiohttp.web.Application()
    app.router.add_get("/metrics", page)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0, ssl_context=trust)
    await site.start()
    assert site._server is not None
    ports = {"grpc": grpc_port, "http": site._server.sockets[0].getsockname()[1]}
    yield Pod("router", "router", "", "127.0.0.1", ports, 0.0, ending=False, drained_since_s=None)
    await runner.cleanup()
    await server.stop(0)


async def test_page_and_status_come_by_tls_under_the_name_of_the_service(router: Pod, authority: Authority):
    sources = Sources("", 20.0, RouterTlsSettings(ca=authority.cert, server_name=NAME).client())
    [figures] = await sources.routers([router])
    assert figures.page.by_outcome["finished"] == 3
    assert figures.status.queue_len == 7
    await sources.close()


class Drains(fleet_pb2_grpc.FleetServiceServicer):
    """Takes down which workers it is asked to drain; raises `error`, if it has one."""

    def __init__(self, error: TandemError | None = None) -> None:
        self.error, self.asked = error, list[str]()

    async def Drain(self, request: Any, context: Any) -> fleet_pb2.DrainedWorkers:  # noqa: N802
        self.asked += request.workers
        if self.error is not None:
            await abort(context, self.error)
        return fleet_pb2.DrainedWorkers()


async def drained_by(*errors: TandemError | None) -> list[bool]:
    """Which of the routers that answer so are asked. Raises what `drain` does."""
    sources, pods, routers, servers = Sources("", 20.0), list[Pod](), list[Drains](), list[grpc.aio.Server]()
    for number, error in enumerate(errors):
        routers.append(Drains(error))
        servers.append(grpc.aio.server())
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(routers[-1], servers[-1])
        port = servers[-1].add_insecure_port("127.0.0.1:0")
        await servers[-1].start()
        pods.append(
            Pod(f"r-{number}", "router", "", "127.0.0.1", {"grpc": port}, 0.0, ending=False, drained_since_s=None)
        )
    try:
        await sources.drain(pods, "w")
    finally:
        await sources.close()
        for server in servers:
            await server.stop(0)
    return [router.asked == ["w"] for router in routers]


async def test_routers_are_asked_to_drain_a_worker_until_one_has():
    unconnected = InvalidRequest("worker w is not connected", field="workers", value="w")
    assert await drained_by(None, None) == [True, False]
    assert await drained_by(unconnected, None, None) == [True, True, False]
    with pytest.raises(InvalidRequest, match="not connected"):
        await drained_by(NotFound("there is no worker 'w'"), unconnected)
    with pytest.raises(WorkerLost, match="no router is ready"):
        await drained_by()
    with pytest.raises(DeadlineExceeded):  # not in vain once more: this one has asked the worker
        await drained_by(DeadlineExceeded("worker w takes requests still"), None)


@pytest.mark.parametrize("name", ["", "another.serving.svc", None], ids=["the address", "another name", "no TLS"])
async def test_a_router_that_is_somebody_else_is_not_believed(router: Pod, authority: Authority, name: str | None):
    sources = Sources("", 20.0, None if name is None else ClientTls(ca=authority.cert, server_name=name))
    with pytest.raises(TandemError):
        await sources.routers([router])
    await sources.close()


def test_a_file_that_is_no_authority_is_refused_by_name(tmp_path: Path):
    assert RouterTlsSettings().client() is None
    (tmp_path / "ca").write_text("not PEM")
    for ca in (tmp_path / "ca", tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"router_tls\.ca") as refused:
            RouterTlsSettings(ca=ca).client()
        assert refused.value.field == "router_tls.ca"
