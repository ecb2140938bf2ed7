"""Figures of routers whose APIs have TLS, which the planner reaches by their Pods' addresses."""

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
from shared.errors import ConfigError, TandemError
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
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
