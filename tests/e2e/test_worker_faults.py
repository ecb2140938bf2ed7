"""Workers are drained, killed and stopped under streams that run: every stream gives what it gives undisturbed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import psutil
import pytest
import pytest_asyncio

from tests.e2e.running import DEADLINE_S, Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 20
FIELDS = {"max_tokens": 900, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


def prompt(number: int) -> list[int]:
    return [20 + (i * (37 + 2 * number)) % 2000 for i in range(60)]


@dataclass
class Stream:
    """One client's stream."""

    number: int
    max_tokens: int = FIELDS["max_tokens"]
    tokens: list[int] = field(default_factory=list)
    longest_pause_s: float = 0.0
    error: str = ""

    async def run(self, cluster: Running) -> None:
        body = {"prompt": prompt(self.number), "stream": True, **FIELDS, "max_tokens": self.max_tokens}
        last = time.monotonic()
        async with cluster.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                self.error = f"{response.status_code}: {(await response.aread()).decode()}"
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.error = str(event["error"])
                    return
                now = time.monotonic()
                if self.tokens:
                    self.longest_pause_s = max(self.longest_pause_s, now - last)
                last = now
                self.tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


async def begun(streams: list[Stream], num_begun: int) -> None:
    """Waits until so many of the streams decode."""
    async with asyncio.timeout(DEADLINE_S):
        while sum(len(stream.tokens) >= 3 or stream.error != "" for stream in streams) < num_begun:
            await asyncio.sleep(0.01)


async def undisturbed(cluster: Running, max_tokens: int = FIELDS["max_tokens"]) -> list[list[int]]:
    fields = {**FIELDS, "max_tokens": max_tokens}
    return list(await asyncio.gather(*(cluster.tokens(prompt(n), **fields) for n in range(NUM_STREAMS))))


async def under_fault(
    cluster: Running, fault, max_tokens: int = FIELDS["max_tokens"], num_begun: int = NUM_STREAMS
) -> list[Stream]:
    """Streams of which so many decode when `fault` strikes, run to their end."""
    streams = [Stream(number, max_tokens) for number in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(stream.run(cluster)) for stream in streams]
    await begun(streams, num_begun)
    await fault(streams)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*tasks)
    return streams


def nothing_lost(streams: list[Stream], expected: list[list[int]]) -> None:
    assert [stream.error for stream in streams] == [""] * NUM_STREAMS
    assert [stream.tokens for stream in streams] == expected


async def gone(pid: int) -> None:
    """Waits until the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        async with asyncio.timeout(DEADLINE_S):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_prefill_pool_that_is_drained_one_by_one_costs_no_stream_a_token(tmp_path):
    async with running(tmp_path, num_prefill=2, num_decode=2, num_kv_blocks=1100) as cluster:
        expected = await undisturbed(cluster)
        pids = {name: cluster.cluster.children[name].pid for name in ("prefill-0", "prefill-1")}

        async def drain_all(streams: list[Stream]) -> None:
            for pid in pids.values():
                assert any(len(stream.tokens) < FIELDS["max_tokens"] for stream in streams), "all ended before"
                os.kill(pid, signal.SIGTERM)
                await gone(pid)

        nothing_lost(await under_fault(cluster, drain_all), expected)


async def stopped(cluster: Running, role: str, seconds: float) -> None:
    """SIGSTOP, and SIGCONT later, to the worker of that role that has the most requests."""
    status = await cluster.status()
    busiest = max((w for w in status.workers if w.worker.name.startswith(role)), key=lambda w: w.num_requests)
    pid = cluster.cluster.children[busiest.worker.name].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


async def retries(cluster: Running) -> float:
    page = (await cluster.http.get("/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("tandem_retries"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_decoders(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Running, list[list[int]]]]:
    """For tests that leave all workers running, and what its streams give undisturbed."""
    folder = tmp_path_factory.mktemp("cluster")
    async with running(folder, num_prefill=1, num_decode=2, num_kv_blocks=1600) as cluster:
        yield cluster, await undisturbed(cluster)


@pytest.mark.slow
async def test_a_decode_worker_stopped_for_3_s_is_only_a_pause(two_decoders):
    cluster, expected = two_decoders
    before = await retries(cluster)
    streams = await under_fault(cluster, lambda _: stopped(cluster, "decode", 3.0))
    nothing_lost(streams, expected)
    assert await retries(cluster) == before
    assert 2.5 < max(stream.longest_pause_s for stream in streams) < 5.0
    await cluster.idle()


@pytest.mark.slow
async def test_streams_of_a_decode_worker_stopped_for_20_s_go_on_elsewhere_after_5(two_decoders):
    cluster, expected = two_decoders
    streams = await under_fault(cluster, lambda _: stopped(cluster, "decode", 20.0))
    nothing_lost(streams, expected)
    assert 4.0 < max(stream.longest_pause_s for stream in streams) < 8.0
    await cluster.until(lambda status: all(worker.connected for worker in status.workers))
    await cluster.idle()
    assert await cluster.tokens(prompt(0), **FIELDS) == expected[0]


async def test_new_requests_outlive_the_loss_of_the_only_prefill_worker(tmp_path):
    """The router knows of the loss before they come: the decode worker computes their prompts."""
    async with running(tmp_path, num_prefill=1, num_decode=1) as cluster:
        expected = [await cluster.tokens(prompt(n), max_tokens=20) for n in range(5)]
        os.kill(cluster.cluster.children["prefill-0"].pid, signal.SIGKILL)
        lost = await cluster.until(lambda status: not status.ready)
        assert "no prefill worker is ready" in lost.not_ready_reason
        found = await asyncio.gather(*(cluster.tokens(prompt(n), max_tokens=20) for n in range(5)))
        assert list(found) == expected


async def test_new_requests_wait_for_the_successor_of_the_only_decode_worker(tmp_path):
    async with running(tmp_path, num_prefill=1, num_decode=1, restart=True) as cluster:
        expected = [await cluster.tokens(prompt(n), max_tokens=20) for n in range(5)]
        os.kill(cluster.cluster.children["decode-0"].pid, signal.SIGKILL)
        lost = await cluster.until(lambda status: not status.ready)
        assert "no decode worker is ready" in lost.not_ready_reason
        found = await asyncio.gather(*(cluster.tokens(prompt(n), max_tokens=20) for n in range(5)))
        assert list(found) == expected
