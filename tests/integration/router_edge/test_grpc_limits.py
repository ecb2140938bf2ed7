"""Bounds of the gRPC API."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from services.router.dispatch.request import TokenDelta, TokenLogprobs
from shared.errors import InvalidRequest, PromptTooLong
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from shared.rpc.server import channel
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.integration.router_edge.test_grpc import failure, text_request
from tests.waiting import DEADLINE_S


async def serves(edge: Edge) -> bool:
    edge.says("x")
    return bool([response async for response in edge.grpc.Generate(text_request())])


async def test_a_message_beyond_the_limit_is_refused(start_edge: StartEdge) -> None:
    edge = await start_edge(limits={"max_grpc_message_bytes": 10_000})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [r async for r in edge.grpc.Generate(text_request("a" * 10_001))]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await serves(edge)


LISTS = [
    (inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1] * 500_000)), "prompt"),
    (
        inference_pb2.GenerateRequest(
            chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="u")] * 100_000)
        ),
        "messages",
    ),
    (text_request("hi", types_pb2.SamplingParams(stop=[""] * 300_000)), "stop"),
    (text_request("hi", types_pb2.SamplingParams(stop_token_ids=[1] * 300_000)), "stop_token_ids"),
    (text_request("hi", types_pb2.SamplingParams(stop=["a" * 900_000])), "stop"),
    (text_request("a" * 1_000_000), "prompt"),
    (
        text_request(
            "hi", types_pb2.SamplingParams(structured_output=types_pb2.StructuredOutput(allowed_tokens="9" * 5000))
        ),
        "allowed_tokens",
    ),
]


@pytest.mark.parametrize(("request_", "field"), LISTS, ids=range(len(LISTS)))
async def test_huge_lists_and_texts_are_refused_by_field(
    edge: Edge, request_: inference_pb2.GenerateRequest, field: str
) -> None:
    """The typed error arrives although it quotes what was sent: a trailer has a few KiB only."""
    code, error = await failure(edge.grpc.Generate(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, InvalidRequest)
    assert (error.field, len(error.message) < 500) == (field, True)
    assert isinstance(error, PromptTooLong) == (field in ("prompt", "messages"))


HUGE_FIELDS = ("model", "request_id", "cache_salt", "text")


@pytest.mark.parametrize("code_point", ["a", "\n", "🎉"])
@pytest.mark.parametrize("fields", [*((name,) for name in HUGE_FIELDS), HUGE_FIELDS])
async def test_whatever_is_huge_the_typed_error_arrives(edge: Edge, fields: tuple[str, ...], code_point: str) -> None:
    huge = dict.fromkeys(fields, code_point * 60_000)
    code, error = await failure(edge.grpc.Generate(inference_pb2.GenerateRequest(**{"text": "hi", **huge})))
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), error
    assert error.field in (*fields, "prompt")
    assert len(error.message) <= 400


@pytest.mark.parametrize("method", ["GetStatus", "Explain"])
async def test_a_bug_in_a_page_is_a_typed_error_without_its_text(
    edge: Edge, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("🎉" * 100_000)

    monkeypatch.setattr(edge.servicer, "_status", broken)
    monkeypatch.setattr(edge.servicer, "_explain", broken)
    request = inference_pb2.GetStatusRequest() if method == "GetStatus" else inference_pb2.ExplainRequest()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(edge.grpc, method)(request)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert from_rpc_error(caught.value, "router").message == "internal error (ValueError)"


async def test_calls_beyond_the_limit_are_refused(start_edge: StartEdge) -> None:
    edge = await start_edge(limits={"max_grpc_calls": 2})
    edge.core.script = lambda request: [asyncio.Event()]
    calls = [edge.grpc.Generate(text_request()) for _ in range(2)]
    reads = [asyncio.ensure_future(call.read()) for call in calls]
    while len(edge.core.running) < 2:
        await asyncio.sleep(0.01)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [r async for r in edge.grpc.Generate(text_request())]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call, read in zip(calls, reads, strict=True):
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
    await edge.closed(0)
    await edge.closed(1)
    assert await serves(edge)


@contextlib.asynccontextmanager
async def relay_that_stops(address: str, num_bytes: int) -> AsyncIterator[str]:
    """A relay to `address` that stops reading its answers after `num_bytes`: what a client does that never reads."""
    host, _, port = address.rpartition(":")
    links: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_read = 0
        while num_read < num_bytes and (data := await reader.read(4096)):
            num_read += len(data)
            writer.write(data)
        await asyncio.Event().wait()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        links.add(link)
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(writer):
            upstream = socket.create_connection((host, int(port)))
            upstream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            up_reader, up_writer = await asyncio.open_connection(sock=upstream, limit=4096)
            with contextlib.closing(up_writer):
                await asyncio.gather(forward(reader, up_writer), answer(up_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for link in links:
            link.cancel()
        await asyncio.gather(*links)


async def test_a_client_that_never_reads_is_cut_off_and_its_request_freed(start_edge: StartEdge) -> None:
    edge = await start_edge(limits={"write_timeout_s": 0.3})
    token = edge.tokenizer.encode("a", add_special_tokens=False)[0]
    entry = TokenLogprobs(-0.5, tuple((token, -0.5) for _ in range(20)))
    edge.core.limit = 200_000
    edge.core.script = lambda request: [TokenDelta((token,), (entry,))] * 100_000
    request = text_request(sampling=types_pb2.SamplingParams(max_tokens=100_000, logprobs=20))
    async with relay_that_stops(edge.grpc_address, 20_000) as address, channel(address) as slow:
        call = inference_pb2_grpc.InferenceServiceStub(slow).Generate(request)
        await edge.closed()
        assert 0 < edge.core.running[0].num_read < 100_000
        assert await asyncio.wait_for(serves(edge), DEADLINE_S)
        call.cancel()
