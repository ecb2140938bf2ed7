"""Failpoints in real workers: what they break costs a pause."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from tests.e2e.running import DEMO, running
from tests.waiting import DEADLINE_S

PROMPT = [20 + (i * 37) % 2000 for i in range(300)]
FIELDS = {"max_tokens": 120, "ignore_eos": True}


@pytest.mark.slow
async def test_a_worker_whose_engine_thread_ends_goes_with_it_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_WORKER_FAILPOINTS", "engine.step=raise")
    async with running(tmp_path, num_decode=2, restart=True) as cluster:
        fields = {**FIELDS, "max_tokens": 1000}  # long enough to be seen and struck
        expected = await cluster.tokens(PROMPT, **fields)
        await cluster.idle()
        asking = asyncio.create_task(cluster.tokens(PROMPT, **fields))
        busy = await cluster.busy()
        await cluster.arm(busy)
        assert await asking == expected
        assert await cluster.restarted(busy) == "exit status 1"
        log = (cluster.cluster.children[busy].log_path).read_text()
        assert "the engine died" in log
        await cluster.idle()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["engine.step=hang:2", "ucx.send=hang:2", "session.send=hang:2"])
async def test_a_prefill_worker_that_stands_still_is_a_pause(tmp_path, monkeypatch, fault):
    monkeypatch.setenv("TANDEM_WORKER_FAILPOINTS", fault)
    async with running(tmp_path) as cluster:
        expected = await cluster.tokens(PROMPT, **FIELDS)
        await cluster.arm("prefill-0")
        began = asyncio.get_running_loop().time()
        other = [*PROMPT[1:], 21]  # nothing of it is cached
        await cluster.tokens(other, **FIELDS)
        assert asyncio.get_running_loop().time() - began > 1.0
        assert await cluster.tokens(PROMPT, **FIELDS) == expected
        await cluster.idle()


def test_production_refuses_to_start_with_them():
    command = [sys.executable, "-m", "services.decode", "--name", "d", "--model", str(DEMO), "--production", "true"]
    done = subprocess.run(
        [*command, "--failpoints", "engine.step=hang"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 2
    assert "production refuses" in done.stdout
