"""Targets that are down, die, refuse or break: each has its cause, none hangs."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.config import Traffic
from loadtest.records import FailureCause
from loadtest.run import RunResult
from loadtest.schedule import Limits
from loadtest.slo import Slo
from loadtest.summary import summarize
from shared.errors import ConfigError
from tests.integration.loadtest.conftest import StartFake
from tests.integration.loadtest.fake_script import Behaviour
from tests.integration.loadtest.load import load

pytestmark = pytest.mark.slow

PLAIN = Behaviour(messages=((10, 1), (10, 1)))


def causes(result: RunResult) -> set[FailureCause]:
    return {record.failure.cause for record in result.records if record.failure is not None}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_target_that_dies_in_mid_run_ends_it_as_partial(start_fake: StartFake, protocol: str) -> None:
    server = start_fake(*[PLAIN] * 10, Behaviour(messages=((10, 1), (10, 1)), die_after=1))
    result = await load(server.target(protocol), limits=Limits(num_requests=400), give_up_s=0.5)
    summary = summarize(result)
    assert summary["partial"]
    assert "the target was gone from" in summary["partial_reason"]
    assert summary["completed"] >= 9
    assert causes(result) >= {FailureCause.DISCONNECTED, FailureCause.UNREACHABLE}
    assert summary["offered"] < 100, "it gave up after half a second"


async def test_a_target_may_be_gone_for_a_while_where_that_is_wanted(start_fake: StartFake) -> None:
    server = start_fake(PLAIN, Behaviour(messages=((10, 1), (10, 1)), die_after=1))
    result = await load(server.http, limits=Limits(num_requests=20), give_up_s=0.0)
    assert not result.stopped
    assert len(result.records) == 20


@pytest.mark.parametrize(("status", "cause"), [(429, FailureCause.OVERLOADED), (500, FailureCause.SERVER_ERROR)])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_refusals_have_their_cause_and_are_misses(
    start_fake: StartFake, protocol: str, status: int, cause: FailureCause
) -> None:
    server = start_fake(PLAIN, Behaviour(refuse=status))
    result = await load(server.target(protocol), slo=Slo(5.0, 5.0), limits=Limits(num_requests=10))
    assert causes(result) == {cause}
    assert summarize(result)["attainment"] == 0.5


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_an_error_in_mid_stream_is_a_failure_that_keeps_its_tokens(start_fake: StartFake, protocol: str) -> None:
    server = start_fake(Behaviour(messages=((5, 1), (5, 1), (5, 1)), fail_after=2))
    result = await load(server.target(protocol), limits=Limits(num_requests=3))
    assert causes(result) == {FailureCause.SERVER_ERROR}
    assert all(record.reply.token_counts == [1, 1] for record in result.records)
    assert summarize(result)["mean_ttft_ms"] is None


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_an_answer_that_never_ends_times_out(start_fake: StartFake, protocol: str) -> None:
    server = start_fake(Behaviour(messages=((5, 1), (60_000, 1))), PLAIN)
    # Long enough for a plain answer on a busy machine too.
    result = await load(server.target(protocol), limits=Limits(num_requests=4), request_timeout_s=1.5)
    assert causes(result) == {FailureCause.TIMEOUT}
    assert sum(record.ok for record in result.records) == 2, "other requests do not see what was left on the line"


async def test_a_target_that_refuses_the_warm_up_is_not_measured(start_fake: StartFake) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = b'{"data": [{"id": "m"}]}' if b"/models" in head else b'{"error": {"message": "bad token id 999"}}'
        status = b"200 OK" if b"/models" in head else b"400 Bad Request"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(ConfigError, match=r"did not answer the warm-up \(rejected\): bad token id 999"):
            await load(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {", FailureCause.DISCONNECTED),
        (b"SSH-2.0-OpenSSH_9.2\r\n", FailureCause.PROTOCOL),
        (b"", FailureCause.DISCONNECTED),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\ndata: <html>\n\n", FailureCause.PROTOCOL),
    ],
    ids=["cut", "not http", "silent", "not json"],
)
async def test_answers_that_are_none_are_called_so(answer: bytes, cause: FailureCause) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        models = b"HTTP/1.1 200 OK\r\ncontent-length: 23\r\nconnection: close\r\n\r\n" + b'{"data": [{"id": "m"}]}'
        writer.write(models if b"/models" in head else answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        result = await load(
            f"http://127.0.0.1:{port}", traffic=Traffic(concurrency=1), limits=Limits(num_requests=2), num_warmup=0
        )
    assert causes(result) == {cause}
