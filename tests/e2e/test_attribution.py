"""A cluster made slow in six known ways: the status names the right cause in each.

Targets are so short that every request misses them: what is asserted is what most of the time went to, on machines of
any speed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.kv.handoff.stall import STALLED_S
from tests.e2e.running import Running, running
from tests.e2e.slowing import narrow_connection, starved
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow
LINK_DOWN_S = 0.7 * STALLED_S
"""A longer standstill ends the attempt."""


@pytest.fixture
def ttft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every first token is late; nothing else is judged."""
    monkeypatch.setenv("TANDEM_ROUTER_TARGETS__TTFT_S", "1e-6")


@pytest.fixture
def tpot_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every further token is late; nothing else is judged."""
    monkeypatch.setenv("TANDEM_ROUTER_TARGETS__TPOT_S", "1e-6")
    monkeypatch.setenv("TANDEM_WORKER_TPOT_TARGET_MS", "0")  # batches are as large as without a target


async def ask(run: Running, name: str, prompts: Sequence[str], max_tokens: int) -> None:
    """All at once, with request ids that begin with the name."""
    await asyncio.gather(
        *(
            run.http.post(
                "/v1/completions",
                json={"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
                headers={"x-request-id": f"{name}-{number}"},
            )
            for number, prompt in enumerate(prompts)
        )
    )


async def causes(run: Running, name: str, count: int) -> list[str]:
    """What the requests of that name were lost to, once all have ended."""

    async def found() -> list[str] | None:
        rows = (await run.http.get("/status/requests")).json()["requests"]
        lost = [row["lost_to"] for row in rows if row["request_id"].startswith(f"{name}-") and row["lost_to"]]
        return lost if len(lost) >= count else None

    return await until(found)


def most(found: Sequence[str]) -> str:
    """The commonest."""
    return max(set(found), key=list(found).count)


def pids(run: Running) -> dict[str, int]:
    """Of each process of the cluster."""
    return {name: child.pid for name, child in run.cluster.children.items()}


async def test_a_starved_prefill_worker_and_a_starved_router_are_told_apart(tmp_path: Path, ttft_alone: None) -> None:
    async with running(tmp_path, num_kv_blocks=1024) as run:
        await ask(run, "warm", ["a b c"] * 2, 2)
        by_name = pids(run)
        for name, number in (("prefill-0", 4), ("router", 8)):
            long = [f"{name} {number} " + "and then the fox ran on " * 40 for number in range(number)]
            short = [f"{name} {number}" for number in range(number)]
            with starved(by_name[name]):
                await ask(run, name, long if name == "prefill-0" else short, 2)
            found = await causes(run, name, number)
            assert most(found) == {"prefill-0": "prefill_compute", "router": "router"}[name], found


async def test_a_pool_that_is_too_small_is_named(tmp_path: Path, ttft_alone: None) -> None:
    async with running(tmp_path, num_kv_blocks=24, max_model_len=256) as run:
        await ask(run, "room", [f"{number} " + "a small fox " * 20 for number in range(12)], 120)
        found = await causes(run, "room", 12)
        assert most(found) == "kv_room", found
        window = (await run.status(3600)).window  # a slow machine takes more than a minute
        assert window.binding == "kv_room"
        assert (window.num_requests, window.num_good) == (12, 0)
        assert sum(share.num_lost for share in window.causes) == 12


async def test_a_link_at_a_standstill_a_large_batch_and_a_slow_client_are_told_apart(
    tmp_path: Path, tpot_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_WORKER_FAILPOINTS", f"ucx.send=hang:{LINK_DOWN_S:g}")
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__LIMITS__WRITE_TIMEOUT_S", "600")
    async with running(tmp_path, num_kv_blocks=1024) as run:
        await ask(run, "batch", [f"{number} and on" for number in range(24)], 60)
        assert most(await causes(run, "batch", 24)) == "decode_step"

        await run.arm("prefill-0")
        await ask(run, "link", [f"{number} over a link" for number in range(4)], 4)
        assert most(await causes(run, "link", 4)) == "transfer"

        begun = time.perf_counter()
        body = {
            "prompt": "slowly",
            "max_tokens": 1000,  # with their log-probabilities more than the kernel's buffers take
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 20,
        }
        connection = narrow_connection(run.cluster.http, json.dumps(body).encode(), "client-0")
        try:
            await run.until(lambda status: status.flow.num_decoding == 1)
            await run.until(lambda status: status.num_running == 0)
            computed_s = time.perf_counter() - begun
            await run.until(lambda _: time.perf_counter() - begun > 3 * computed_s)
            await asyncio.to_thread(_drain, connection)
        finally:
            connection.close()
        await run.until(
            lambda status: any(share.cause == "client" and share.num_lost for share in status.window.causes)
        )
        assert await causes(run, "client", 1) == ["client"]


def _drain(connection) -> None:
    connection.settimeout(DEADLINE_S)
    while connection.recv(65536):
        pass
