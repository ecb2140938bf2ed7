"""A decode worker's step, by the share of requests that are sampled: its time by the engine's own clock, and the whole
process's processor time, in which what the event loop does for traces is too.

One cluster, one process of each kind. Answers begin together and end together; what two such batches cost is a turn's
figure, and the next turn has another share. So pairs lie two seconds apart, in one process, and have the same steps:
other processes, prompts or numbers of answers would differ by more than traces cost.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadtest.bench.router.client import Load
from loadtest.bench.traces.loads import answered, connected
from loadtest.bench.traces.pairs import SAMPLES, order, show
from loadtest.bench.traces.switched_router import Switch, switched
from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands
from services.local.spec import DEMO_MODEL, ClusterSpec
from shared.errors import Internal
from shared.identity import WorkerRole

TIMEOUT_S = 120.0
PROMPT_TOKENS = 64
NUM_TOKENS = 64
NUM_BATCHES = 2
"""One behind the other, in a turn."""
SETTLE_S = 1.2
"""As in router_cost.py."""
WARM_TURNS = 3
_CPUCLOCK_SCHED = 2  # clock_getcpuclockid(3) makes the same number of it and the process id


@dataclass(frozen=True, slots=True)
class StepCosts:
    """For each round by `SAMPLES`, milliseconds a step."""

    engine: list[list[float]]
    """By the engine's clock."""
    process: list[list[float]]
    """Processor time of the worker."""


async def step_costs(endpoint: str, rounds: int, in_flight: int, scratch: Path) -> StepCosts:
    """Rounds of `in_flight` answers for each share."""
    spec = ClusterSpec(
        model=DEMO_MODEL,
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        num_kv_blocks=2048,
        state_dir=scratch / "cluster",
        traces_endpoint=endpoint,
    )
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(spec, commands=SwitchedCommands(spec, scratch)))
        connection = await stack.enter_async_context(connected(cluster.routers[0].grpc))
        switch = await Switch.open(scratch / "step-switch")
        stack.callback(switch.close)
        found = StepCosts([], [])
        for turn in range(-WARM_TURNS, rounds):
            engine, process = [0.0] * len(SAMPLES), [0.0] * len(SAMPLES)
            for at in order(turn):
                await switch.set(SAMPLES[at])
                before = await _steps(cluster)
                load = Load((connection,), PROMPT_TOKENS, NUM_TOKENS, f"s{turn}-{at}-")
                for _ in range(NUM_BATCHES):
                    await asyncio.gather(*(load.one() for _ in range(in_flight)))
                await asyncio.sleep(SETTLE_S)
                after = await _steps(cluster)
                answered(load)
                num_steps, engine_s, process_s = (new - old for new, old in zip(after, before, strict=True))
                engine[at], process[at] = 1e3 * engine_s / num_steps, 1e3 * process_s / num_steps
            if turn >= 0:
                show("decode step", engine)
                show("decode worker, a step", process)
                found.engine.append(engine)
                found.process.append(process)
        return found


class SwitchedCommands(TandemCommands):
    """A cluster's services; its router is switched."""

    def __init__(self, spec: ClusterSpec, scratch: Path) -> None:
        super().__init__(spec)
        self._usual = TandemCommands(spec)
        self._socket = scratch / "step-switch"

    def check(self) -> None:
        """See ServiceCommands; of the usual commands, since the settings know no switch."""
        self._usual.check()

    def router(
        self, workers: Mapping[WorkerRole, Mapping[str, str]], kvstore: str, stores: str = "", number: int = 0
    ) -> Sequence[str]:
        """See ServiceCommands."""
        return switched(super().router(workers, kvstore, stores, number), self._socket)


async def _steps(cluster: LocalCluster) -> tuple[float, float, float]:
    """Number and seconds of the decode worker's steps so far by its metrics page, and its processor time."""
    cpu_s = time.clock_gettime(~cluster.children["decode-0"].pid << 3 | _CPUCLOCK_SCHED)
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
        page = (await http.get(f"http://{cluster.metrics['decode-0']}/metrics")).text

    def value(name: str) -> float:
        found = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
        if found is None:
            raise Internal(f"the metrics page has no {name}")
        return float(found[1])

    return value("tandem_engine_steps_total"), value("tandem_engine_step_seconds_total"), cpu_s
