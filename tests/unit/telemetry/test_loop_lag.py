"""What a blocked loop shows on the metrics page."""

from __future__ import annotations

import asyncio
import time

from shared.telemetry import loop_lag
from shared.telemetry.loop_lag import PERIOD_S, LoopLag
from shared.telemetry.metrics import Metrics
from tests.waiting import DEADLINE_S


async def looks(count: int = 2) -> None:
    await asyncio.sleep((count + 0.5) * PERIOD_S)


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def test_a_blocked_loop_is_late_and_one_that_computes_is_busy_too() -> None:
    lag = LoopLag()
    lag.start()
    time.sleep(0.2)  # noqa: ASYNC251 - it blocks the loop on purpose
    await looks()
    assert lag.largest_s()["clock"] >= 0.2 - PERIOD_S
    assert lag.largest_s()["computing"] < 0.1
    compute(0.15)
    await looks()
    assert lag.largest_s()["computing"] >= 0.15
    lag.close()
    lag.close()


async def test_what_was_long_ago_is_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(loop_lag, "WINDOW_S", 0.0)  # each look begins another window
    lag = LoopLag()
    lag.start()
    compute(0.15)
    await looks(1)
    async with asyncio.timeout(DEADLINE_S):
        while lag.largest_s()["computing"] >= 0.15:
            await asyncio.sleep(PERIOD_S)
    lag.close()


async def test_the_page_of_a_process_shows_it() -> None:
    metrics = Metrics("test")
    metrics.watch_loop()
    compute(0.15)
    await looks()
    lines = metrics.page().decode().splitlines()
    shown = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if line.startswith("tandem_event_loop")}
    assert shown['tandem_event_loop_lag_seconds{by="computing"}'] >= 0.15
    assert shown['tandem_event_loop_lag_seconds{by="clock"}'] > 0.0
    metrics.close()
