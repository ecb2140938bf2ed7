"""Both Python clients against the real edge, with a scripted core behind it."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from services.router.dispatch.request import FinishReason
from shared.errors import Cancelled, ConfigError, DeadlineExceeded, Overloaded, Unauthenticated, WorkerLost
from tandem import Answer, AsyncAnswerStream, AsyncTandemClient, ClientTls, TandemClient
from tandem.failures import RouterLost
from tandem.router_choice import Targets
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.tls_files import Authority
from tests.unit.router.edge.scripted_core import text_steps
from tests.waiting import DEADLINE_S

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "clients.md"

Generate = Callable[..., Any]


async def generate_async(targets: list[str], prompt: Any, n: int = 1, settings: Any = None, **options: Any):
    async with AsyncTandemClient(targets, **(settings or {})) as client:
        return await client.generate_n(prompt, n, **options)


async def generate_sync(targets: list[str], prompt: Any, n: int = 1, settings: Any = None, **options: Any):
    def run() -> list[Answer]:
        with TandemClient(targets, **(settings or {})) as client:
            return client.generate_n(prompt, n, **options)

    return await asyncio.to_thread(run)


both = pytest.mark.parametrize("generate", [generate_async, generate_sync])


def first_at(targets: list[str]) -> random.Random:
    """Lets a client begin at the first of them."""
    seed = next(s for s in range(100) if Targets(targets, random.Random(s)).choose() == targets[0])
    return random.Random(seed)


@both
async def test_an_answer_with_everything_that_was_asked_for(edge: Edge, generate: Generate) -> None:
    edge.says("Hello 🎉", finish=FinishReason.STOP)
    prompt = [{"role": "user", "content": "hi"}]
    options = {"seed": 3, "max_tokens": 40, "logprobs": 2, "tenant": "t", "session": "s", "request_id": "mine"}
    (answer,) = await generate([edge.grpc_address], prompt, **options)
    (request,) = edge.core.requests
    assert (answer.text, answer.finish_reason) == ("Hello 🎉", "stop")
    assert (answer.request_id, answer.seed, answer.max_tokens, answer.num_calls) == ("mine", 3, 40, 1)
    assert len(answer.logprobs) == len(answer.token_ids) == answer.usage.num_output_tokens
    assert [len(entry.top) for entry in answer.logprobs] == [2] * len(answer.token_ids)
    assert (request.tenant, request.session, answer.decode_worker) == ("t", "s", "d0")
    assert answer.ttft_ms > 0


@both
async def test_several_answers_come_in_order(edge: Edge, generate: Generate) -> None:
    edge.core.script = lambda request: text_steps(edge.tokenizer, f"answer {request.request_id}")
    answers = await generate([edge.grpc_address], "hi", 3, request_id="r")
    assert [answer.text for answer in answers] == ["answer r-0", "answer r-1", "answer r-2"]


@both
async def test_an_answer_goes_on_where_another_router_can(start_edge: StartEdge, generate: Generate) -> None:
    failing, other = await start_edge(), await start_edge()
    steps = text_steps(other.tokenizer, "one two 🎉 three", FinishReason.STOP)
    failing.core.script = lambda request: [*steps[:4], WorkerLost("all workers are gone")]
    other.core.script = lambda request: steps[len(request.resumed_token_ids) :]
    targets = [failing.grpc_address, other.grpc_address]
    (answer,) = await generate(targets, "hi", settings={"rng": first_at(targets)}, temperature=0.5)
    assert (answer.text, answer.num_calls) == ("one two 🎉 three", 2)
    (first,), (second,) = failing.core.requests, other.core.requests
    assert second.resumed_token_ids == tuple(token for step in steps[:4] for token in step.token_ids)
    assert (first.request_id, first.sampling) == (second.request_id, second.sampling)  # the drawn seed too


async def test_another_process_continues_an_answer_with_what_the_guide_says_to_keep(edge: Edge) -> None:
    (kept,) = re.findall(r"another process\nleft: (.+?) are all that", GUIDE.read_text())
    steps = text_steps(edge.tokenizer, "one two three", FinishReason.STOP)
    edge.core.script = lambda request: [steps[0], asyncio.Event()]
    async with AsyncTandemClient([edge.grpc_address]) as client:
        async with client.stream("hi", temperature=0.5) as stream:
            await anext(stream)
        had = Answer(**{name: getattr(stream.answer, name) for name in re.findall(r"(\w+)`", kept)})
        edge.core.script = lambda request: steps[len(request.resumed_token_ids) :]
        async with client.stream("hi", resume=had, temperature=0.5) as rest:
            assert "".join([delta.text async for delta in rest]) == "one two three".removeprefix(had.text)
    first, second = edge.core.requests
    assert (second.request_id, second.sampling) == (first.request_id, first.sampling)


@both
async def test_typed_errors_reach_the_caller_behind_what_came(start_edge: StartEdge, generate: Generate) -> None:
    edge = await start_edge(api_keys=["sesame"])
    targets = [edge.grpc_address]
    edge.core.script = lambda request: [Overloaded("the queue is full", retry_after_s=2.5)]
    with pytest.raises(Unauthenticated):
        await generate(targets, "hi")
    with pytest.raises(Overloaded) as caught:
        await generate(targets, "hi", settings={"api_key": "sesame"})
    assert caught.value.retry_after_s == 2.5
    edge.core.script = lambda request: [asyncio.Event()]
    with pytest.raises(DeadlineExceeded):
        await generate(targets, "hi", settings={"api_key": "sesame"}, timeout_s=0.5)
    edge.core.script = lambda request: [WorkerLost("no worker")]
    with pytest.raises(WorkerLost, match="no worker"):
        await generate(targets, "hi", settings={"api_key": "sesame", "retry_for_s": 0.2})
    assert len(edge.core.requests) >= 4  # the last one was tried again


@both
async def test_an_address_of_http_is_not_said_to_be_silent(start_edge: StartEdge, generate: Generate) -> None:
    edge = await start_edge()
    address = edge.client.base_url.netloc.decode()
    with pytest.raises(RouterLost, match=f"{address} does not answer: .*is it a router's gRPC address"):
        await generate([address], "hi")


@both
async def test_tls(start_edge: StartEdge, tmp_path: Path, generate: Generate) -> None:
    authority = Authority(tmp_path)
    edge = await start_edge(tls=authority.settings("router"))
    edge.says("hello")
    cert, key = authority.issue("client")
    trusted = ClientTls(ca=str(authority.cert), cert=cert, key=key)
    (answer,) = await generate([edge.grpc_address], "hi", settings={"tls": trusted})
    assert answer.text == "hello"
    for stranger in (None, ClientTls(ca=authority.cert)):
        with pytest.raises(RouterLost, match="do both sides speak TLS, or none"):
            await generate([edge.grpc_address], "hi", settings={"tls": stranger})
    with pytest.raises(ConfigError, match="no-such-file"):
        ClientTls(ca=tmp_path / "no-such-file").credentials()


async def test_closing_a_stream_early_frees_its_request(edge: Edge) -> None:
    edge.core.script = lambda request: [text_steps(edge.tokenizer, "one two")[0], asyncio.Event()]
    async with AsyncTandemClient([edge.grpc_address]) as client:
        async with client.stream("hi") as stream:
            assert (await anext(stream)).token_ids
        await edge.closed(0)

    def leave() -> None:
        with TandemClient([edge.grpc_address]) as client, client.stream("hi", n=2) as stream:
            assert {next(stream).index, next(stream).index} == {0, 1}

    await asyncio.wait_for(asyncio.to_thread(leave), DEADLINE_S)
    for index in (1, 2):
        await edge.closed(index)


async def test_a_stream_that_is_dropped_frees_its_requests(edge: Edge) -> None:
    edge.core.script = lambda request: [text_steps(edge.tokenizer, "one two")[0], asyncio.Event()]
    with TandemClient([edge.grpc_address]) as client:
        await asyncio.to_thread(lambda: deque(islice(client.stream("hi", n=2), 2)))
        for index in (0, 1):
            await edge.closed(index)
    async with AsyncTandemClient([edge.grpc_address]) as other:
        stream = other.stream("hi", n=2)
        assert {(await anext(stream)).index, (await anext(stream)).index} == {0, 1}
        del stream
        for index in (2, 3):
            await edge.closed(index)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_is_closed_ends_its_streams(edge: Edge, n: int) -> None:
    edge.core.script = lambda request: [text_steps(edge.tokenizer, "one two")[0], asyncio.Event()]

    async def read(stream: AsyncAnswerStream) -> None:
        async for _ in stream:
            pass

    client = AsyncTandemClient([edge.grpc_address])
    stream = client.stream("hi", n=n)
    for _ in range(n):
        await anext(stream)
    reader = asyncio.create_task(read(stream))
    await client.close()
    for late in (reader, client.generate("hi"), client.status()):
        with pytest.raises(Cancelled, match="the client is closed"):
            await asyncio.wait_for(late, DEADLINE_S)
    for index in range(n):
        await edge.closed(index)
    assert (len(edge.core.requests), client._channels) == (n, {})


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_of_threads_that_is_closed_ends_its_streams(edge: Edge, n: int) -> None:
    edge.core.script = lambda request: [text_steps(edge.tokenizer, "one two")[0], asyncio.Event()]
    client = TandemClient([edge.grpc_address])
    stream = client.stream("hi", n=n)
    await asyncio.to_thread(deque, islice(stream, n))
    reader = asyncio.to_thread(deque, stream)
    client.close()
    for late in (reader, asyncio.to_thread(client.generate, "hi"), asyncio.to_thread(client.status)):
        with pytest.raises(Cancelled, match="the client is closed"):
            await asyncio.wait_for(late, DEADLINE_S)
    for index in range(n):
        await edge.closed(index)
    assert (len(edge.core.requests), client._channels) == (n, {})


async def test_status_comes_from_the_router_that_answers(edge: Edge) -> None:
    targets = ["127.0.0.1:1", edge.grpc_address]
    async with AsyncTandemClient(targets, rng=first_at(targets)) as client:
        assert (await client.status(timeout_s=math.inf)).router_name == "router-0"

    def ask() -> str:
        with TandemClient(targets, rng=first_at(targets)) as client:
            assert client.explain("r").request_id == "r"
            return client.status(timeout_s=math.inf).router_name

    assert await asyncio.to_thread(ask) == "router-0"
