"""A router is lost under streams: both Python clients go on at the other one, and every answer is what it would have
been."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio

from shared.errors import RequestRunning, TakenOver
from tandem import Answer, AsyncAnswerStream, AsyncTandemClient, TandemClient
from tandem.router_choice import Targets
from tests.e2e.running import Running, running
from tests.e2e.stage import prompt
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHAPE = {"num_prefill": 2, "num_decode": 2, "num_routers": 2, "num_kv_blocks": 800}
BEFORE_THE_FAULT = 8
NUM_TOKENS = 250
SEEDED = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.3}
ASKED: list[dict[str, Any]] = [
    {"prompt": prompt(75), "temperature": 0.0, "n": 1},
    {"prompt": prompt(150, seed=41), "temperature": 0.0, "frequency_penalty": 0.2, "logprobs": 2, "n": 1},
    {"prompt": prompt(40, seed=43), "seed": 11, **SEEDED, "logprobs": 0, "n": 1},
    {"prompt": "In the beginning", "seed": 12, **SEEDED, "n": 2},
    {"prompt": [{"role": "user", "content": "Tell me about Noah."}], "seed": 13, "temperature": 1.0, "n": 1},
]
"""What is asked for, by each of the two clients."""


class Loads:
    """Streams of both clients at once."""

    def __init__(self, cluster: Running, first: str) -> None:
        """Both begin at the router `first`."""
        routers = [router.grpc for router in cluster.cluster.routers]
        seed = next(s for s in range(100) if Targets(routers, random.Random(s)).choose() == first)
        self.asynchronous = AsyncTandemClient(routers, rng=random.Random(seed))
        self.synchronous = TandemClient(routers, rng=random.Random(seed))
        self._threads = ThreadPoolExecutor(len(ASKED) + 1)
        self.num_begun = 0

    async def close(self) -> None:
        await self.asynchronous.close()
        self.synchronous.close()
        self._threads.shutdown()

    def start(self, asked: list[dict[str, Any]]) -> list[asyncio.Future[list[Answer]]]:
        loop = asyncio.get_running_loop()
        return [
            *(asyncio.ensure_future(self._stream(fields)) for fields in asked),
            *(loop.run_in_executor(self._threads, self._stream_here, fields, loop) for fields in asked),
        ]

    def _count(self, answer: Answer, counted: set[str]) -> bool:
        """True once for an answer that has enough tokens."""
        if len(answer.token_ids) < BEFORE_THE_FAULT or answer.request_id in counted:
            return False
        counted.add(answer.request_id)
        return True

    def _begun(self) -> None:
        self.num_begun += 1

    async def _stream(self, fields: dict[str, Any]) -> list[Answer]:
        counted: set[str] = set()
        async with self.asynchronous.stream(max_tokens=NUM_TOKENS, ignore_eos=True, **fields) as stream:
            async for delta in stream:
                if self._count(stream.answers[delta.index], counted):
                    self._begun()
            return stream.answers

    def _stream_here(self, fields: dict[str, Any], loop: asyncio.AbstractEventLoop) -> list[Answer]:
        counted: set[str] = set()
        with self.synchronous.stream(max_tokens=NUM_TOKENS, ignore_eos=True, **fields) as stream:
            for delta in stream:
                if self._count(stream.answers[delta.index], counted):
                    loop.call_soon_threadsafe(self._begun)
            return stream.answers


async def to_the_end(stream: AsyncAnswerStream) -> None:
    async for _ in stream:
        pass


def assert_equal(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.text == expected.text
    assert answer.finish_reason == expected.finish_reason
    assert answer.usage.num_output_tokens == expected.usage.num_output_tokens == len(expected.token_ids)
    assert answer.usage.num_prompt_tokens == expected.usage.num_prompt_tokens
    assert len(answer.logprobs) == len(expected.logprobs)
    for mine, theirs in zip(answer.logprobs, expected.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=2e-3)


async def with_a_stop_string(cluster: Running, fields: dict[str, Any]) -> dict[str, Any]:
    """The same, cut late by a stop string of several tokens."""
    async with AsyncTandemClient([cluster.cluster.grpc]) as client:
        whole = await client.generate(fields["prompt"], temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return {**fields, "stop": [whole.text[-40:-28]]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """For tests that leave all of it running."""
    async with running(tmp_path_factory.mktemp("cluster"), **SHAPE) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [True, False])
async def test_a_half_open_stream_is_taken_over(cluster, elsewhere):
    """The older call stays open and is still being served: the newer one ends it, at any router."""
    routers = [router.grpc for router in cluster.cluster.routers]
    options = {"temperature": 0.0, "max_tokens": 1500, "ignore_eos": True}
    async with AsyncTandemClient(routers[:1]) as here, AsyncTandemClient(routers[elsewhere:][:1]) as there:
        expected = await here.generate(prompt(75), **options)
        older = here.stream(prompt(75), request_id=f"mine-{elsewhere}", **options)
        while len(older.answer.token_ids) < BEFORE_THE_FAULT:
            await anext(older)
        with pytest.raises(RequestRunning):
            await here.generate(prompt(75), request_id=f"mine-{elsewhere}", **options)
        newer = there.stream(prompt(75), resume=older.answer, **options)
        await anext(newer)
        with pytest.raises(TakenOver):
            await to_the_end(older)
        await to_the_end(newer)
        assert_equal(newer.answer, expected)
        await cluster.idle()


async def streams_go_on(cluster: Running, fault: signal.Signals) -> None:
    """Under that fault of the router that all of them have."""
    asked = [*ASKED, await with_a_stop_string(cluster, ASKED[0])]
    victim = cluster.cluster.routers[1]
    loads = Loads(cluster, victim.grpc)
    try:
        expected = [a for answers in await asyncio.gather(*loads.start(asked)) for a in answers]
        assert all(answer.router == "router-1" and answer.num_calls == 1 for answer in expected)
        loads.num_begun = 0
        streams = loads.start(asked)
        await until(lambda: loads.num_begun == len(expected))
        pid = cluster.cluster.children[victim.name].pid
        os.kill(pid, fault)
        try:
            async with asyncio.timeout(2 * DEADLINE_S):
                answers = [a for answers in await asyncio.gather(*streams) for a in answers]
        finally:
            if fault == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
        for mine, theirs in zip(answers, expected, strict=True):
            assert_equal(mine, theirs)
        assert sum(answer.num_calls > 1 for answer in answers) > len(answers) // 2  # else nothing was tried
        assert {answer.router for answer in answers if answer.num_calls > 1} == {"router-0"}
        await cluster.idle()
    finally:
        await loads.close()


@pytest.mark.slow
async def test_streams_of_a_stopped_router_go_on_at_the_other(cluster):
    await streams_go_on(cluster, signal.SIGSTOP)


async def test_streams_of_a_killed_router_go_on_at_the_other(tmp_path):
    async with running(tmp_path, num_routers=2, num_kv_blocks=1600) as own:
        await streams_go_on(own, signal.SIGKILL)
