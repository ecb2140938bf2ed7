"""Each part in turn is killed under a stream, or hangs: answers go on, the part is back, and nothing leaks."""

from __future__ import annotations

import asyncio
import signal

import pytest

from services.local.parts import ServicePart
from tests.e2e.running import Running, running
from tests.e2e.stage import prompt
from tests.waiting import DEADLINE_S

PROMPT = prompt(75)
FIELDS = {"max_tokens": 600, "ignore_eos": True}
HANG_S = 10.0


async def probed(cluster: Running, name: str) -> None:
    """Waits until the supervisor has had an answer of that part: before one it does not count as hanging."""
    part, answered = cluster.cluster._parts[name], asyncio.Event()

    async def noting() -> bool:
        if answers := await ServicePart.answers(part):
            answered.set()
        return answers

    part.answers = noting
    async with asyncio.timeout(DEADLINE_S):
        await answered.wait()


@pytest.mark.parametrize("name", ["decode-0", pytest.param("router", marks=pytest.mark.slow)])
async def test_a_part_that_hangs_for_good_is_killed_and_comes_back(tmp_path, name):
    """New requests wait for the successor of the only decode worker."""
    async with running(tmp_path, restart=True, hang_timeout_s=HANG_S) as cluster:
        expected = [await cluster.tokens(prompt(75, seed=37 + 2 * n), max_tokens=8) for n in range(5)]
        await probed(cluster, name)
        cluster.signal(name, signal.SIGSTOP)
        asking = []
        if name == "decode-0":
            lost = await cluster.until(lambda status: not status.ready)
            assert "no decode worker is ready" in lost.not_ready_reason
            asking = [cluster.tokens(prompt(75, seed=37 + 2 * n), max_tokens=8) for n in range(5)]
        waiting = asyncio.gather(*asking)
        assert await cluster.restarted(name) == f"SIGKILL after {HANG_S:g} s without an answer"
        assert await waiting in (expected, [])
        await cluster.healthy()
        assert await cluster.tokens(PROMPT, max_tokens=8) == expected[0]
