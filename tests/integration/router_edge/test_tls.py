"""TLS of both APIs, with real certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.router_edge.conftest import StartEdge
from tests.integration.router_edge.test_http import CHAT, COMPLETIONS, completion
from tests.tls_files import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


async def test_both_apis_speak_tls_and_nothing_else(start_edge: StartEdge, authority: Authority) -> None:
    cert, key = authority.issue("router")
    edge = await start_edge(tls={"cert": str(cert), "key": str(key)})
    edge.says("hello")
    trust = ssl.create_default_context(cafile=authority.cert)
    async with httpx.AsyncClient(base_url=f"https://{edge.http.address}", verify=trust) as client:
        answer = await client.post(COMPLETIONS, json=completion())
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "hello")
        async with client.stream("POST", COMPLETIONS, json=completion(stream=True)) as stream:
            assert [line async for line in stream.aiter_lines() if line][-1] == "data: [DONE]"
        refused = await client.post(CHAT, content=b" " * 9_000_000)
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, "body")
    with pytest.raises(httpx.HTTPError):
        await edge.client.get("/healthz")
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(base_url=f"https://{edge.http.address}") as stranger:
            await stranger.get("/healthz")
    credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())
    async with grpc.aio.secure_channel(edge.grpc_address, credentials) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="hi"))
        assert "".join([response.text async for response in call]) == "hello"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await edge.grpc.GetStatus(inference_pb2.GetStatusRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_with_an_authority_clients_need_certificates(
    start_edge: StartEdge, authority: Authority, tmp_path: Path
) -> None:
    edge = await start_edge(tls=authority.settings("router-2"))
    edge.says("hello")
    trust = ssl.create_default_context(cafile=authority.cert)
    async with httpx.AsyncClient(base_url=f"https://{edge.http.address}", verify=trust) as client:
        with pytest.raises(httpx.HTTPError):
            await client.post(COMPLETIONS, json=completion())
    trust.load_cert_chain(*authority.issue("client"))
    async with httpx.AsyncClient(base_url=f"https://{edge.http.address}", verify=trust) as client:
        assert (await client.post(COMPLETIONS, json=completion())).status_code == 200
