"""The picker's server by itself: TLS, names that do not resolve, settings that cannot be."""

from __future__ import annotations

import asyncio
import ssl

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.router.edge.settings import EdgeSettings
from services.router.picker.server import NAME, PickerServer
from services.router.picker.settings import PickerSettings
from shared.errors import ConfigError
from tests.integration.router_picker.routers import Exchange, free_ports
from tests.tls_files import Authority
from tests.waiting import DEADLINE_S, until


def server(**settings: object) -> PickerServer:
    wanted = {"bind": "127.0.0.1:0", "endpoints": "127.0.0.1:1", **settings}
    return PickerServer(
        PickerSettings.model_validate(wanted), EdgeSettings(), lambda hints: None, lambda: 1, lambda outcome: None
    )


async def test_a_gateway_that_does_not_verify_gets_tls() -> None:
    picker = server(self_signed=True)
    await picker.start()
    try:
        host, _, port = picker.address.rpartition(":")
        pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
        credentials = grpc.ssl_channel_credentials(pem.encode())
        options = [("grpc.ssl_target_name_override", NAME)]
        async with (
            grpc.aio.secure_channel(picker.address, credentials, options=options) as channel,
            Exchange(channel) as exchange,
        ):
            assert (await exchange.headers()).immediate_response.status.code == 503
        async with grpc.aio.insecure_channel(picker.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    finally:
        await picker.close()


async def test_it_is_alive_before_it_has_looked_and_ready_after() -> None:
    picker = server(endpoints=f"localhost:{free_ports(1)[0]},no-such-name.invalid:8000")
    await picker.start()
    try:
        async with grpc.aio.insecure_channel(picker.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def status(name: str) -> int:
                return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S)).status

            assert await status("liveness") == health_pb2.HealthCheckResponse.SERVING

            async def is_ready() -> bool:
                return await status("readiness") == health_pb2.HealthCheckResponse.SERVING

            await until(is_ready)
            async with Exchange(channel) as exchange:
                assert (await exchange.headers()).immediate_response.status.code == 503
    finally:
        await picker.close()
        await picker.close()


@pytest.mark.parametrize("endpoints", ["", " , ", "router", "router:0", "router:99999"])
def test_endpoints_that_are_none_are_refused(endpoints: str) -> None:
    with pytest.raises(ConfigError, match=r"picker\.endpoints"):
        server(endpoints=endpoints)


def test_two_certificates_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        server(self_signed=True, tls=Authority(tmp_path).settings("picker"))
