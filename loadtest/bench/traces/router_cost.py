"""The router's processor time for a request, by the share of requests that are sampled."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

from loadtest.bench.router.client import Load
from loadtest.bench.router.rig import PROMPT_TOKENS, Rig
from loadtest.bench.traces.loads import answered, connected
from loadtest.bench.traces.pairs import SAMPLES, order, show
from loadtest.bench.traces.switched_router import Switch

NUM_WORKERS = 4
WORKERS_TOKENS_PER_S = 20_000.0
NUM_TOKENS = 16
SETTLE_S = 1.2
"""After which a turn's spans are exported: that happens once a second."""
WARM_TURNS = 2


async def router_costs(endpoint: str, rounds: int, rate: float, duration_s: float, scratch: Path) -> list[list[float]]:
    """For each round milliseconds by `SAMPLES`. A turn's time is counted until its spans are exported."""
    socket = scratch / "switch"
    settings = {"switch": socket, "traces.endpoint": endpoint}
    rig = Rig(NUM_WORKERS, WORKERS_TOKENS_PER_S, scratch, router=Switch.ROUTER, settings=settings)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(rig)
        stack.enter_context(_OtherCores())
        connection = await stack.enter_async_context(connected(rig.target))
        switch = await Switch.open(socket)
        stack.callback(switch.close)
        found = []
        for turn in range(-WARM_TURNS, rounds):
            costs = [0.0] * len(SAMPLES)
            for at in order(turn):
                await switch.set(SAMPLES[at])
                before = rig.router_cpu_s()
                load = Load((connection,), PROMPT_TOKENS, NUM_TOKENS, f"t{turn}-{at}-")
                await load.open_loop(rate, duration_s)
                await asyncio.sleep(SETTLE_S)
                # While it warms up, a router may not have found its workers yet.
                num_requests = answered(load) if turn >= 0 else 1
                costs[at] = 1e3 * (rig.router_cpu_s() - before) / num_requests
            if turn >= 0:
                show("router, a request", costs)
                found.append(costs)
        return found


class _OtherCores:
    """Within it this process keeps off the first core, which the router has."""

    def __enter__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(self._cores)[1:] or self._cores)

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._cores)
