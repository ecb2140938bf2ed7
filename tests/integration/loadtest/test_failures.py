"""Targets that are down, die, refuse or break: each has its cause, none hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from loadtest.clients import http_client
from loadtest.config import Traffic
from loadtest.records import FailureCause
from loadtest.run import RunResult
from loadtest.schedule import Limits
from loadtest.slo import Slo
from loadtest.summary import summarize
from shared.errors import ConfigError, WorkerLost
from tests.integration.loadtest.conftest import StartFake
from tests.integration.loadtest.fake_script import Behaviour
from tests.integration.loadtest.load import load
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.slow

PLAIN = Behaviour(messages=((10, 1), (10, 1)))


def plain(body: bytes, status: bytes = b"200 OK") -> bytes:
    """A response as it is on the line."""
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body)


MODELS = plain(b'{"data": [{"id": "m"}]}')
COMPLETION = plain(b'data: {"choices": [{"token_ids": [7], "finish_reason": "length"}]}\n\n')


@asynccontextmanager
async def serving(answer: Callable[[bytes], bytes | None]) -> AsyncIterator[str]:
    """A target that answers each request by its head; None: by nothing, until the client gives up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = answer(await reader.readuntil(b"\r\n\r\n"))
        if found is None:
            await reader.read()
        else:
            writer.write(found)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


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
    refusal = plain(b'{"error": {"message": "bad token id 999"}}', b"400 Bad Request")
    async with serving(lambda head: MODELS if b"/models" in head else refusal) as target:
        with pytest.raises(ConfigError, match=r"did not answer the warm-up \(rejected\): bad token id 999"):
            await load(target)


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
    async with serving(lambda head: MODELS if b"/models" in head else answer) as target:
        result = await load(target, traffic=Traffic(concurrency=1), limits=Limits(num_requests=2), num_warmup=0)
        # One that speaks another protocol will do so at every rate of a sweep; one that breaks off may be back.
        raised = WorkerLost if cause is FailureCause.DISCONNECTED else ConfigError
        with pytest.raises(raised, match=rf"did not answer the warm-up \({cause.value}\)"):
            await load(target)
    assert causes(result) == {cause}


async def test_a_target_that_never_says_what_requests_were_lost_to_costs_no_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(head: bytes) -> bytes | None:
        if b"/completions" in head:  # behind the models, which have all the time that they need
            monkeypatch.setattr(http_client, "STATUS_TIMEOUT_S", 0.05)
        return MODELS if b"/models" in head else COMPLETION if b"/completions" in head else None

    async with serving(answer) as target:
        result = await asyncio.wait_for(load(target), DEADLINE_S)
    assert [record.ok for record in result.records] == [True] * 20
    assert (result.stopped, result.causes) == ("", ())


async def test_a_target_that_never_answers_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "STATUS_TIMEOUT_S", 0.05)
    async with serving(lambda head: None) as target:
        with pytest.raises(WorkerLost, match="does not serve: no answer to GET /v1/models within"):
            await asyncio.wait_for(load(target), DEADLINE_S)


@pytest.mark.parametrize("silent", [b"/models", b"/completions"])
async def test_a_run_that_is_stopped_before_it_begins_has_no_records(silent: bytes) -> None:
    stop = asyncio.Event()

    def answer(head: bytes) -> bytes | None:
        if silent in head:
            stop.set()
        return None if silent in head else MODELS

    async with serving(answer) as target:
        result = await asyncio.wait_for(load(target, stop=stop), DEADLINE_S)
    assert (result.stopped, result.records) == ("stopped by the user", ())
    assert summarize(result)["partial"]
