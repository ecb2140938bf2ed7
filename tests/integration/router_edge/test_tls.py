"""TLS of both APIs and of the tandem command."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.running import tandem
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.integration.router_edge.test_http import CHAT, COMPLETIONS, completion
from tests.tls_files import Authority
from tests.waiting import DEADLINE_S


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
        await edge.grpc.GetStatus(inference_pb2.GetStatusRequest(), timeout=DEADLINE_S)
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


async def test_changed_certificates_are_read_again(start_edge: StartEdge, authority: Authority, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")]
    cert, key, ca = files

    def install(name: str, of: Authority) -> None:
        for source, file in zip((*of.issue(name), of.cert), files, strict=True):
            (staged := tmp_path / "staged").write_bytes(source.read_bytes())
            staged.rename(file)

    install("before", authority)
    edge = await start_edge(tls={"cert": str(cert), "key": str(key), "ca": str(ca)})
    edge.says("hello")
    trust = ssl.create_default_context(cafile=authority.cert)
    trust.load_cert_chain(*authority.issue("old-client"))
    old_grpc = grpc.ssl_channel_credentials(
        authority.cert.read_bytes(), *(file.read_bytes() for file in reversed(authority.issue("old-caller")))
    )
    status = inference_pb2.GenerateRequest(text="hi")
    async with (
        httpx.AsyncClient(base_url=f"https://{edge.http.address}", verify=trust) as client,
        grpc.aio.secure_channel(edge.grpc_address, old_grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert (await client.get("/healthz")).status_code == 200
        assert [response async for response in stub.Generate(status)]

        key.write_text("half of a new one")  # in the middle of a change the old certificate stays
        async with httpx.AsyncClient(base_url=f"https://{edge.http.address}", verify=trust) as other:
            assert (await other.get("/healthz")).status_code == 200
        (tmp_path / "new").mkdir()
        new = Authority(tmp_path / "new")
        install("after", new)

        new_trust = ssl.create_default_context(cafile=new.cert)
        new_trust.load_cert_chain(*new.issue("new-client"))
        for host in ("127.0.0.1", "localhost"):  # without and with a server name in the handshake
            url = f"https://{host}:{edge.http.address.rpartition(':')[2]}"
            async with httpx.AsyncClient(base_url=url, verify=new_trust) as renewed:
                assert (await renewed.get("/healthz")).status_code == 200
        new_grpc = grpc.ssl_channel_credentials(
            new.cert.read_bytes(), *(file.read_bytes() for file in reversed(new.issue("new-caller")))
        )
        async with grpc.aio.secure_channel(edge.grpc_address, new_grpc) as renewed_channel:
            renewed_stub = inference_pb2_grpc.InferenceServiceStub(renewed_channel)
            assert [response async for response in renewed_stub.Generate(status)]
        async with httpx.AsyncClient(base_url=f"https://{edge.http.address}", verify=trust) as outdated:
            with pytest.raises(httpx.HTTPError):
                await outdated.get("/healthz")

        # Connections that were open all the time.
        assert (await client.get("/healthz")).status_code == 200
        assert [response async for response in stub.Generate(status)]


async def command(edge: Edge, *arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command against the edge."""
    return await tandem(*arguments, "--target", edge.grpc_address)


async def test_flags_and_environment(
    start_edge: StartEdge, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = await start_edge(tls=authority.settings("router"))
    edge.says("hello")
    cert, key = authority.issue("operator")
    flags = ["--ca", f"{authority.cert}", "--cert", f"{cert}", "--key", f"{key}"]
    status, out, err = await command(edge, "generate", "hi", "-n", "20", *flags)
    assert (status, out.strip()) == (0, "hello"), err
    for name, file in {"TANDEM_CA": authority.cert, "TANDEM_CERT": cert, "TANDEM_KEY": key}.items():
        monkeypatch.setenv(name, f"{file}")
    status, out, err = await command(edge, "status")
    assert status == 0, err
    assert "prefix hits" in out


async def test_without_its_authority_or_a_certificate_nothing_is_said(
    start_edge: StartEdge, authority: Authority
) -> None:
    edge = await start_edge(tls=authority.settings("router-2"))
    cert, key = authority.issue("operator-2")
    for flags in ([], ["--tls", "--cert", f"{cert}", "--key", f"{key}"], ["--ca", f"{authority.cert}"]):
        status, _, err = await command(edge, "status", *flags)
        assert status == 1
        assert "do both sides speak TLS, or none?" in err
    status, _, err = await command(edge, "status", "--ca", f"{authority.cert}", "--cert", f"{cert}")
    assert (status, "cert and key go together" in err) == (2, True)


async def test_the_name_in_the_certificate(start_edge: StartEdge, authority: Authority) -> None:
    cert, key = authority.issue("pod", "DNS:tandem.svc")
    edge = await start_edge(tls={"cert": f"{cert}", "key": f"{key}"})
    edge.says("hello")
    ca = ["--ca", f"{authority.cert}"]
    assert (await command(edge, "generate", "hi", "-n", "20", *ca, "--server-name", "tandem.svc"))[:2] == (0, "hello\n")
    assert (await command(edge, "status", *ca, "--server-name", "another.svc"))[0] == 1
