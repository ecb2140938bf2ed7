"""Workers are drained, killed and stopped under streams that run: every stream gives what it gives undisturbed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.running import Running, gone, running
from tests.e2e.streams import Streams, prompt, under_fault, undisturbed

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.slow
async def test_a_prefill_pool_that_is_drained_one_by_one_costs_no_stream_a_token(tmp_path):
    async with running(tmp_path, num_prefill=2, num_decode=2, num_kv_blocks=1100) as cluster:
        expected = await undisturbed(cluster)

        async def drain_all(streams: Streams) -> None:
            for name in ("prefill-0", "prefill-1"):
                assert streams.num_open, "all ended before"
                cluster.signal(name, signal.SIGTERM)
                await gone(cluster.pid(name))

        await under_fault(cluster, drain_all, expected)


async def stopped(cluster: Running, seconds: float) -> None:
    """SIGSTOP, and SIGCONT later, to the decode worker that has the most requests."""
    busiest = await cluster.busy()
    cluster.signal(busiest, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        cluster.signal(busiest, signal.SIGCONT)


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
    streams = await under_fault(cluster, lambda _: stopped(cluster, 3.0), expected)
    assert await retries(cluster) == before
    assert 2.5 < streams.longest_pause_s < 5.0
    await cluster.idle()


@pytest.mark.slow
async def test_streams_of_a_decode_worker_stopped_for_20_s_go_on_elsewhere_after_5(two_decoders):
    cluster, expected = two_decoders
    streams = await under_fault(cluster, lambda _: stopped(cluster, 20.0), expected)
    assert 4.0 < streams.longest_pause_s < 8.0
    await cluster.until(lambda status: all(worker.connected for worker in status.workers))
    await cluster.idle()
    assert await cluster.tokens(prompt(0), max_tokens=8) == expected[0][:8]


async def test_without_its_only_prefill_worker_the_decode_worker_computes_prompts(tmp_path):
    """The router knows of the loss before they come."""
    async with running(tmp_path) as cluster:
        expected = [await cluster.tokens(prompt(n), max_tokens=20) for n in range(5)]
        cluster.signal("prefill-0")
        lost = await cluster.until(lambda status: not status.ready)
        assert "no prefill worker is ready" in lost.not_ready_reason
        assert (await cluster.http.get("/readyz")).status_code == 503
        found = await asyncio.gather(*(cluster.tokens(prompt(n), max_tokens=20) for n in range(5)))
        assert list(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
async def test_disaggregated_is_collocated_is_cached(tmp_path, kv_dtype):
    fields = {"max_tokens": 64, "ignore_eos": True}
    async with running(tmp_path / "collocated", mode="collocated", num_prefill=0, kv_dtype=kv_dtype) as cluster:
        expected = await cluster.tokens(prompt(0, 75), **fields)
    async with running(tmp_path / "two", num_prefill=2, num_decode=2, kv_dtype=kv_dtype) as cluster:
        results = await asyncio.gather(*(cluster.tokens(prompt(0, 75), **fields) for _ in range(6)))
        assert results == [expected] * 6
        response = await cluster.complete(prompt(0, 75), **fields)
        assert response["choices"][0]["token_ids"] == expected
        assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
