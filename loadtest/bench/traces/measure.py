"""`python -m loadtest.bench traces`: what traces cost the router for a request, and a decode worker for a step.

Routers without a collector, with 1 % sampled and with all, side by side, loaded in turns of a few seconds: first over
scripted workers, for their processor time; then over one cluster with the demo model, for its decode worker's steps.
Each figure is a ratio to the one without a collector in the same round, and the median of the rounds is given.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import httpx
import typer

from loadtest.bench.router.client import Load
from loadtest.bench.router.http2 import Connection
from loadtest.bench.router.rig import PROMPT_TOKENS, Rig
from loadtest.command_line import Out
from loadtest.figures import Result, machine, table, write
from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands
from services.local.spec import ClusterSpec
from shared.child_process import ChildProcess
from shared.errors import Internal
from shared.identity import WorkerRole

START_S = 120.0
DEMO = Path(__file__).parents[3] / "models" / "demo"
SAMPLES: tuple[float | None, ...] = (None, 0.01, 1.0)
"""None: no collector."""
GOALS = {0.01: 2.0, 1.0: 5.0}
"""Most that it may cost by share sampled, percent."""
WARM_S = 2.0
SETTLE_S = 1.2
"""After which exports are those of the present load: they are made once a second."""
ROUTER_TOKENS = 16
STEP_TOKENS = 64


async def router_costs(endpoint: str, rounds: int, rate: float, duration_s: float, scratch: Path) -> list[list[float]]:
    """For each round the router's processor time a request, milliseconds, by `SAMPLES`.

    A turn's time is counted until its router's next turn begins, so that it has what was exported late.
    """
    async with AsyncExitStack() as stack:
        rigs = [Rig(4, 20_000.0, _folder(scratch, f"router-{at}"), settings=_flags(endpoint, sample))
                for at, sample in enumerate(SAMPLES)]  # fmt: skip
        await asyncio.gather(*(stack.enter_async_context(rig) for rig in rigs))
        stack.enter_context(_OtherCores())
        connections = [await stack.enter_async_context(_connected(rig.target)) for rig in rigs]
        before, num_requests = [0.0] * len(rigs), [0] * len(rigs)
        found = []
        for turn in range(-1, rounds + 1):  # the first warms up, the last one only ends the one before
            costs = [0.0] * len(rigs)
            if turn == rounds:
                await asyncio.sleep(SETTLE_S)
            for at in _order(turn):
                now = rigs[at].router_cpu_s()
                costs[at] = 1e3 * (now - before[at]) / max(1, num_requests[at])
                before[at] = now
                if turn < rounds:
                    load = Load((connections[at],), PROMPT_TOKENS, ROUTER_TOKENS, f"t{turn}-{at}-")
                    await load.open_loop(rate, WARM_S if turn < 0 else duration_s)
                    # While it warms up, a router may not have found its workers yet.
                    num_requests[at] = len(load.requests) if turn < 0 else _answered(load)
            if turn > 0:
                found.append(costs)
        return found


async def step_costs(endpoint: str, rounds: int, in_flight: int, duration_s: float, scratch: Path) -> list[list[float]]:
    """For each round the decode worker's time a step, milliseconds, by `SAMPLES` of the router that loads it."""
    spec = ClusterSpec(
        model=DEMO,
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        num_routers=len(SAMPLES),
        num_kv_blocks=2048,
        state_dir=scratch / "cluster",
        traces_endpoint=endpoint,
    )
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(spec, commands=SamplingRouters(spec)))
        connections = [await stack.enter_async_context(_connected(router.grpc)) for router in cluster.routers]
        found = []
        for turn in range(-1, rounds):
            costs = [0.0] * len(SAMPLES)
            for at in _order(turn):
                load = Load((connections[at],), 64, STEP_TOKENS, f"s{turn}-{at}-")
                async with _streaming(load, in_flight):
                    await asyncio.sleep(SETTLE_S)
                    num_before, busy_before = await _steps(cluster)
                    await asyncio.sleep(duration_s)
                    num_after, busy_after = await _steps(cluster)
                _answered(load)
                costs[at] = 1e3 * (busy_after - busy_before) / max(1.0, num_after - num_before)
            if turn >= 0:
                found.append(costs)
        return found


class SamplingRouters(TandemCommands):
    """A cluster's services; its routers differ in what they sample."""

    def __init__(self, spec: ClusterSpec) -> None:
        super().__init__(spec)
        specs = [
            replace(spec, traces_endpoint="" if sample is None else spec.traces_endpoint, traces_sample=sample)
            for sample in SAMPLES
        ]
        self._by_sample = [TandemCommands(spec) for spec in specs]

    def router(
        self, workers: Mapping[WorkerRole, Mapping[str, str]], kvstore: str, stores: str = "", number: int = 0
    ) -> Sequence[str]:
        """See ServiceCommands."""
        return self._by_sample[number].router(workers, kvstore, stores, number)


class _OtherCores:
    """Within it this process keeps off the first core, which the router has."""

    def __enter__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(self._cores)[1:] or self._cores)

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._cores)


def _flags(endpoint: str, sample: float | None) -> dict[str, object]:
    return {} if sample is None else {"traces.endpoint": endpoint, "traces.sample": sample}


def _folder(scratch: Path, name: str) -> Path:
    folder = scratch / name
    folder.mkdir()
    return folder


def _order(turn: int) -> list[int]:
    """Another one begins each round, so that a drift of the machine is nobody's."""
    numbers = list(range(len(SAMPLES)))
    return numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]


@asynccontextmanager
async def _connected(target: str) -> AsyncIterator[Connection]:
    connection = await Connection.open(target)
    try:
        yield connection
    finally:
        connection.close()


@asynccontextmanager
async def _streaming(load: Load, in_flight: int) -> AsyncIterator[None]:
    """This many answers at once; those that have begun are read to their end."""
    over = asyncio.Event()

    async def user() -> None:
        while not over.is_set():
            await load.one()

    users = [asyncio.create_task(user()) for _ in range(in_flight)]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*users)


def _answered(load: Load) -> int:
    """How many; raises Internal where one failed."""
    if load.num_failed:
        raise Internal(f"{load.num_failed} requests failed, such as: {load.failure}")
    return len(load.requests)


async def _steps(cluster: LocalCluster) -> tuple[float, float]:
    """Number and seconds of the decode worker's steps so far, by its metrics page."""
    async with httpx.AsyncClient(timeout=START_S) as http:
        page = (await http.get(f"http://{cluster.metrics['decode-0']}/metrics")).text

    def value(name: str) -> float:
        found = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
        if found is None:
            raise Internal(f"the metrics page has no {name}")
        return float(found[1])

    return value("tandem_engine_steps_total"), value("tandem_engine_step_seconds_total")


def results_of(name: str, unit: str, costs: list[list[float]]) -> list[Result]:
    """The median without a collector, and for each share sampled the median of the rounds' ratios to it."""
    results = [Result(f"{name}, no traces", median(round_[0] for round_ in costs), unit)]
    for number, sample in enumerate(SAMPLES):
        if sample is not None:
            more = 100 * (median(round_[number] / round_[0] for round_ in costs) - 1)
            results.append(Result(f"{name}, {sample:.0%} sampled: more", more, "%", limit=GOALS.get(sample)))
    return results


async def measure_all(rounds: int, rate: float, in_flight: int, duration_s: float) -> list[Result]:
    """Both parts, with one collector."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        sink = ChildProcess("sink", [sys.executable, "-m", "loadtest.bench.traces.sink"], scratch / "sink.log")
        await sink.start()
        try:
            endpoint = f"http://{(await sink.ready(START_S)).address}"
            router = await router_costs(endpoint, rounds, rate, duration_s, scratch)
            steps = await step_costs(endpoint, rounds, in_flight, duration_s, scratch)
        finally:
            sink.kill()
            await sink.stop(START_S)
    for name, costs in (("router", router), ("step", steps)):
        print(name, *("/".join(f"{cost:.3f}" for cost in round_) for round_ in costs), "ms")
    return [
        *results_of("router's processor time a request", "ms", router),
        *results_of(f"decode step, {in_flight} answers", "ms", steps),
    ]


def main(
    out: Out = None,
    rounds: Annotated[int, typer.Option(help="rounds; each loads all three in turn")] = 9,
    rate: Annotated[float, typer.Option(help="requests per second of the router's part")] = 200.0,
    in_flight: Annotated[int, typer.Option(help="answers at once of the decode step's part")] = 8,
    duration: Annotated[float, typer.Option(help="seconds a load")] = 1.5,
) -> None:
    """Measure what traces cost a router and a decode worker."""
    print(machine())
    results = asyncio.run(measure_all(rounds, rate, in_flight, duration))
    print(table(results))
    if out is not None:
        write(out, results)
