"""The process beside a measured cluster computes when it should, and only then."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from loadtest.bench.long_prompt.noisy_neighbour import noisy_neighbour
from shared.errors import Internal
from tests.waiting import DEADLINE_S

DEMO = Path("models/demo")


@pytest.mark.slow
async def test_a_neighbour_computes_only_while_it_is_busy_and_is_gone_at_the_end(tmp_path):
    core = min(os.sched_getaffinity(0))
    async with noisy_neighbour(DEMO, 64, 128, core, tmp_path) as neighbour:
        process = psutil.Process(neighbour.pid)
        deadline = time.monotonic() + DEADLINE_S
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
        before = process.cpu_times().user
        with neighbour.busy():
            while process.cpu_times().user < before + 0.1:
                assert time.monotonic() < deadline
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
    assert not psutil.pid_exists(neighbour.pid)


@pytest.mark.slow
async def test_a_neighbour_without_a_model_says_so(tmp_path):
    with pytest.raises(Internal):
        async with noisy_neighbour(tmp_path, 64, 128, 0, tmp_path):
            pass
