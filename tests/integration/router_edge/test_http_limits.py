"""Bounds of the HTTP server: every refusal reaches its client, names the limit, and leaves the others alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import httpx
import pytest

from services.router.dispatch.request import FinishReason, TokenDelta
from services.router.edge.limits import LimitSettings
from shared.errors import QuotaExceeded
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import inference_pb2
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.integration.router_edge.test_http import CHAT, COMPLETIONS, completion
from tests.waiting import DEADLINE_S

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def limits_of(**values: float) -> LimitSettings:
    """Limits of which those that are constants have other values too."""
    constants = {name: value for name, value in values.items() if name not in LimitSettings.model_fields}
    settings = {name: value for name, value in values.items() if name in LimitSettings.model_fields}
    return type("Limits", (LimitSettings,), constants)(**settings)


@contextlib.asynccontextmanager
async def connection(edge: Edge) -> AsyncIterator[Streams]:
    host, _, port = edge.http.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """The one answer of a connection that the server closes: status and `error` of the body."""
    raw = await asyncio.wait_for(reader.read(), DEADLINE_S)
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


async def serves(edge: Edge) -> bool:
    """Whether another client is served as ever."""
    edge.says("x")
    async with httpx.AsyncClient(base_url=f"http://{edge.http.address}", verify=False) as client:
        return (await client.post(COMPLETIONS, json=completion())).status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"x-large: " + b"a" * 4000,
        b"\r\n".join(b"x-%d: %s" % (i, b"a" * 50) for i in range(60)),
        b"x-large: " + b"a" * 4_000_000,
    ],
    ids=["one field", "many fields", "a field that does not end"],
)
async def test_headers_beyond_their_bytes_are_431(start_edge: StartEdge, head: bytes) -> None:
    edge = await start_edge(limits={"max_header_bytes": 1024})
    async with connection(edge) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + head)
        if len(head) < 10_000:
            writer.write(b"\r\n\r\n")
        status, error = await answer(reader)
    assert (status, error["param"]) == (431, "headers")
    assert "1024" in error["message"]
    assert await serves(edge)


async def test_a_target_beyond_the_limit_and_too_many_fields_are_431(start_edge: StartEdge) -> None:
    edge = await start_edge(limits=limits_of(max_header_bytes=1024, max_headers=8))
    for request in (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 9 + b"\r\n"):
        async with connection(edge) as (reader, writer):
            writer.write(request)
            assert (await answer(reader))[0] == 431


async def test_what_is_not_http_is_400_in_openais_shape(edge: Edge) -> None:
    async with connection(edge) as (reader, writer):
        writer.write(b"\x16\x03\x01garbage\r\n\r\n")
        status, error = await answer(reader)
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("announced", [True, False])
async def test_a_413_reaches_a_client_that_sends_all_before_it_reads(edge: Edge, announced: bool) -> None:
    """50 MB at once: a server that closes with unread bytes would reset the connection and lose its own answer."""
    size, piece = 50_000_000, b" " * 1_000_000
    async with connection(edge) as (reader, writer):
        length = b"content-length: %d" % size if announced else b"transfer-encoding: chunked"
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\n%s\r\n\r\n" % (CHAT.encode(), length))
        for _ in range(size // len(piece)):
            writer.write(piece if announced else b"%x\r\n%s\r\n" % (len(piece), piece))
            await asyncio.wait_for(writer.drain(), DEADLINE_S)
        status, error = await answer(reader)
    assert (status, error["param"]) == (413, "body")
    assert str(8 * 1024 * 1024) in error["message"]
    assert await serves(edge)


async def test_an_endless_body_is_dropped_up_to_a_bound_only(start_edge: StartEdge) -> None:
    edge = await start_edge(max_body_bytes=1024, limits=limits_of(discard_bytes=1_000_000))
    async with connection(edge) as (_, writer):
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode())

        async def send_on() -> None:
            while True:
                writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                await writer.drain()

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_on(), DEADLINE_S)
    assert await serves(edge)


async def test_a_head_and_a_body_that_trickle_in_are_408(start_edge: StartEdge) -> None:
    edge = await start_edge(limits=limits_of(header_timeout_s=0.5, body_timeout_s=0.5))
    starts = {
        "headers": b"GET /healthz HTTP/1.1\r\nhost: ",
        "body": b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % CHAT.encode(),
    }
    for field, start in starts.items():
        async with connection(edge) as (reader, writer):
            writer.write(start)
            answering = asyncio.create_task(answer(reader))
            while not answering.done():  # a byte now and then does not renew the time
                writer.write(b" ")
                await asyncio.sleep(0.02)
            status, error = await answering
        assert (status, error["param"]) == (408, field)
        assert "0.5" in error["message"]
    async with connection(edge) as (reader, _):
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""  # never used: closed without a word
    assert await serves(edge)


async def test_a_connection_that_is_kept_open_may_be_silent_between_requests(start_edge: StartEdge) -> None:
    edge = await start_edge(limits=limits_of(header_timeout_s=1.5, body_timeout_s=1.5))
    request = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    async with connection(edge) as (reader, writer):
        for pause_s in (2.0, 0.0):
            writer.write(request)
            await asyncio.wait_for(reader.readuntil(b'{"status":"ok"}'), DEADLINE_S)
            await asyncio.sleep(pause_s)


async def test_connections_beyond_the_limits_are_429(start_edge: StartEdge) -> None:
    for limits in ({"max_connections": 3}, {"max_connections_per_client": 3}):
        edge = await start_edge(limits=limits)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(connection(edge))
            async with connection(edge) as (reader, _):
                status, error = await answer(reader)
            assert (status, error["param"], error["code"]) == (429, "connections", "overloaded")
        async with asyncio.timeout(DEADLINE_S):
            while not await serves(edge):
                pass


async def test_a_client_that_never_reads_is_cut_off_and_its_request_freed(start_edge: StartEdge) -> None:
    edge = await start_edge(limits=limits_of(write_timeout_s=0.3, send_buffer_bytes=4096))
    token = edge.tokenizer.encode("a", add_special_tokens=False)[0]
    edge.core.limit = 200_000
    edge.core.script = lambda request: [TokenDelta((token,)) for _ in range(100_000)]
    host, _, port = edge.http.address.rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(completion(stream=True, max_tokens=100_000)).encode()
        client.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\n" % COMPLETIONS.encode())
        client.sendall(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await edge.closed()
    assert 0 < edge.core.running[0].num_read < 50_000
    assert await serves(edge)


async def test_a_slow_reader_gets_all_of_its_answer(start_edge: StartEdge) -> None:
    edge = await start_edge(limits=limits_of(write_timeout_s=2.0, send_buffer_bytes=4096))
    token = edge.tokenizer.encode("a", add_special_tokens=False)[0]
    edge.core.limit = 20_000
    edge.core.script = lambda request: [TokenDelta((token,))] * 1500 + [TokenDelta((token,), (), FinishReason.LENGTH)]
    async with connection(edge) as (reader, writer):
        body = json.dumps(completion(stream=True, max_tokens=2000)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        raw = b""
        while piece := await asyncio.wait_for(reader.read(16_384), DEADLINE_S):
            raw += piece
            await asyncio.sleep(0.15)  # longer than the limit in all
    assert raw.count(b"data: ") == 1502


async def test_a_client_that_leaves_pipelined_requests_frees_the_first_too(edge: Edge) -> None:
    edge.core.script = lambda request: [asyncio.Event()]
    body = json.dumps(completion()).encode()
    request = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (COMPLETIONS.encode(), len(body), body)
    async with connection(edge) as (_, writer):
        writer.write(request + request)
        await asyncio.wait_for(edge.core.submitted.wait(), DEADLINE_S)
    await edge.closed()


HUGE: dict[str, Callable[[], bytes]] = {
    "token ids": lambda: b'{"prompt": [' + b"1," * 200_000 + b"1]}",
    "lists of token ids": lambda: b'{"prompt": [' + b"[1]," * 100_000 + b"[1]]}",
    "prompts": lambda: b'{"prompt": [' + b'"a",' * 200_000 + b'"a"]}',
    "messages": lambda: b'{"messages": [' + b'{"role":"u","content":""},' * 50_000 + b'{"role":"u","content":""}]}',
    "fields": lambda: b'{"prompt": "a", ' + b",".join(b'"k%d": 1' % i for i in range(50_000)) + b"}",
    "an unknown field": lambda: b'{"prompt": "a", "x": [' + b"{}," * 100_000 + b"{}]}",
}


@pytest.mark.parametrize("kind", HUGE)
async def test_bodies_of_too_many_values_are_refused_unparsed(
    edge: Edge, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(self: object, body: bytes) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("services.router.edge.http.openai.completions.Completions.parse", parse)
    reply = await edge.client.post(COMPLETIONS, content=HUGE[kind]())
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "body")
    assert "JSON" in reply.json()["error"]["message"]


async def test_a_text_full_of_commas_and_brackets_is_no_structure(edge: Edge) -> None:
    edge.says("x")
    edge.core.limit = 300_000
    text = '[{"a": 1}, {"b\\": ["], ' * 12_000
    reply = await edge.client.post(COMPLETIONS, json=completion(prompt=text, max_tokens=1))
    assert reply.status_code == 200, reply.text
    assert edge.core.requests[0].prompt_token_ids == tuple(edge.tokenizer.encode(text))


async def test_nesting_beyond_the_parsers_depth_is_400_and_names_it(edge: Edge) -> None:
    for body in (b'{"prompt": ' + b"[" * 4000, b'{"prompt": "a", "x": ' + b"[" * 4000 + b"]" * 4000 + b"}"):
        reply = await edge.client.post(COMPLETIONS, content=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "body")
        assert "nested" in reply.json()["error"]["message"]


async def test_stop_strings_are_few_and_short_and_their_error_too(edge: Edge) -> None:
    for stop in (["a"] * 17, ["a" * 257], "a" * 1_000_000):
        reply = await edge.client.post(COMPLETIONS, json=completion(stop=stop))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stop")
        assert len(reply.content) < 4096


async def test_rates_are_429_with_retry_after_over_http_and_grpc_together(start_edge: StartEdge) -> None:
    edge = await start_edge(api_keys=("k1", "k2"), limits={"requests_per_minute": 2, "tokens_per_minute": 1000})
    edge.says("x")
    key = {"authorization": "Bearer k1"}
    assert (await edge.client.post(COMPLETIONS, json=completion(), headers=key)).status_code == 200
    call = edge.grpc.Generate(inference_pb2.GenerateRequest(text="hi"), metadata=tuple(key.items()))
    assert [response async for response in call]
    refused = await edge.client.post(COMPLETIONS, json=completion(), headers=key)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (429, "quota_exceeded", "requests_per_minute")
    assert 25 <= int(refused.headers["retry-after"]) <= 30
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [r async for r in edge.grpc.Generate(inference_pb2.GenerateRequest(text="hi"), metadata=tuple(key.items()))]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    typed = from_rpc_error(caught.value, "router")
    assert isinstance(typed, QuotaExceeded)
    assert 25 <= float(str(typed.details["retry_after_s"])) <= 30
    other = {"authorization": "Bearer k2"}
    assert (await edge.client.post(COMPLETIONS, json=completion(), headers=other)).status_code == 200


async def test_tokens_of_prompts_and_answers_are_charged(start_edge: StartEdge) -> None:
    edge = await start_edge(limits={"tokens_per_minute": 60})
    edge.says("x")
    prompt = [5] * 59
    assert (await edge.client.post(COMPLETIONS, json=completion(prompt=prompt))).status_code == 200
    refused = await edge.client.post(COMPLETIONS, json=completion(prompt=prompt))
    assert (refused.status_code, refused.json()["error"]["param"]) == (429, "tokens_per_minute")


async def test_the_api_is_described_where_clients_look_for_it(edge: Edge) -> None:
    answer = await edge.client.get("/openapi.json")
    assert answer.json()["openapi"].startswith("3.1")
    assert set(answer.json()["paths"]) >= {COMPLETIONS, CHAT}
