"""Runs the generator in the test's own event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from loadtest.clients.connect import make_client
from loadtest.clients.target import parse_target
from loadtest.config import LoadConfig, Traffic
from loadtest.driver.collector import Collector
from loadtest.run import RunResult, execute, plan_run
from loadtest.schedule import Limits
from loadtest.slo import Slo

CONFIG = LoadConfig(
    target="",
    workload="fixed:input=20,output=8",
    slo=Slo(0.15, 0.05),
    traffic=Traffic(arrivals="constant", rate=20),
    limits=Limits(num_requests=20),
    seed=11,
    max_lag_ms=1000,
)


async def load(
    target: str, stop_after: int | None = None, stop: asyncio.Event | None = None, **changes: object
) -> RunResult:
    """One run of CONFIG with changes, stopped by `stop`, and when `stop_after` requests are done."""
    stop = stop or asyncio.Event()

    def look(collector: Collector) -> None:
        if stop_after is not None and collector.num_done >= stop_after:
            stop.set()

    config = replace(CONFIG, target=target, **changes)  # type: ignore[arg-type]
    client = make_client(parse_target(target))
    try:
        return await execute(plan_run(config), client, stop, look)
    finally:
        await client.close()
