"""Each part in turn is killed under a stream: the stream goes on, the part is back, and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx
import pytest

from services.local.restarts import Died, Restarted
from tests.e2e.running import DEADLINE_S, Running, running

PROMPT = [20 + (i * 37) % 2000 for i in range(75)]
NUM_TOKENS = 600
BEFORE_THE_KILL = 20
PARTS = ["valkey", "kvstore", "store-1", "prefill-0", "decode-0", "router"]


async def stream(cluster: Running, tokens: list[int], struck: asyncio.Event) -> None:
    """Adds the tokens of a greedy stream; sets `struck` once there are some."""
    body = {"prompt": PROMPT, "stream": True, "return_token_ids": True, "temperature": 0, "ignore_eos": True}
    async with cluster.http.stream("POST", "/v1/completions", json={**body, "max_tokens": NUM_TOKENS}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens += event["choices"][0].get("token_ids") or ()
                if len(tokens) >= BEFORE_THE_KILL:
                    struck.set()


async def back(cluster: Running, name: str) -> None:
    """Waits for the part's death and its return."""
    async with asyncio.timeout(DEADLINE_S):
        died, restarted = [await cluster.cluster.next_change() for _ in range(2)]
    assert isinstance(died, Died)
    assert (died.name, died.how) == (name, "SIGKILL")
    assert isinstance(restarted, Restarted)
    assert restarted.name == name


async def healthy(cluster: Running) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                page = (await cluster.http.get("/readyz")).json()
                if page["ready"] and not page["degraded"]:
                    break
            except httpx.HTTPError:
                pass  # the router is not back yet
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_every_part_is_back_after_its_death_under_a_stream(tmp_path):
    shape = {"num_prefill": 2, "num_decode": 2, "store_nodes": 2, "store_host_bytes": 1 << 22}
    async with running(tmp_path, restart=True, **shape) as cluster:
        fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        expected = await cluster.tokens(PROMPT, **fields)
        for name in PARTS:
            tokens: list[int] = []
            struck = asyncio.Event()
            asking = asyncio.create_task(stream(cluster, tokens, struck))
            await struck.wait()
            pid = cluster.cluster.index_pid if name == "valkey" else cluster.cluster.children[name].pid
            os.kill(pid, signal.SIGKILL)
            if name == "router":
                with pytest.raises(httpx.HTTPError):
                    await asking
                assert tokens == expected[: len(tokens)]
            else:
                await asking
                assert tokens == expected, name
            await back(cluster, name)
            await healthy(cluster)
            await cluster.idle()
            assert await cluster.tokens(PROMPT, **fields) == expected


@pytest.mark.parametrize("name", ["decode-0", pytest.param("router", marks=pytest.mark.slow)])
async def test_a_part_that_hangs_for_good_is_killed_and_comes_back(tmp_path, name):
    async with running(tmp_path, num_decode=2, restart=True, hang_timeout_s=10.0) as cluster:
        expected = await cluster.tokens(PROMPT, max_tokens=8)
        pid = cluster.cluster.children[name].pid
        await asyncio.sleep(3.0)  # it has answered a probe
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(DEADLINE_S):
            died, restarted = [await cluster.cluster.next_change() for _ in range(2)]
        assert isinstance(died, Died)
        assert (died.name, died.how) == (name, "SIGKILL after 10 s without an answer")
        assert isinstance(restarted, Restarted)
        await healthy(cluster)
        assert await cluster.tokens(PROMPT, max_tokens=8) == expected
