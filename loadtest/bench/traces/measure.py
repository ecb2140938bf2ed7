"""`python -m loadtest.bench traces`: what traces cost the router for a request, and a decode worker for a step.

Four routers (no collector; one, with nothing sampled, with 1 %, with all) stand side by side over scripted workers and
are loaded in turns; so are four whole clusters over the demo model. Each figure is a ratio to the one without a
collector in the same round, and the median of the rounds is given. With nothing sampled the workers still keep their
spans for requests that turn out slow.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import httpx
import typer

from loadtest.bench.router.rig import Rig
from loadtest.command_line import Out
from loadtest.figures import Result, machine, table, write
from services.local.cluster import LocalCluster
from services.local.spec import ClusterSpec
from shared.child_process import ChildProcess
from shared.errors import Internal

START_S = 120.0
CLIENT_S = 300.0
DEMO = Path(__file__).parents[3] / "models" / "demo"
SAMPLES: tuple[float | None, ...] = (None, 0.0, 0.01, 1.0)
"""None: no collector."""
GOALS = {0.01: 2.0, 1.0: 5.0}
"""Most that it may cost by share sampled, percent."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What a decode worker's metrics page says of its steps."""

    num_steps: float
    busy_s: float


async def router_costs(endpoint: str, rounds: int, rate: float, duration_s: float, scratch: Path) -> list[list[float]]:
    """For each round the router's processor time a request, milliseconds, by `SAMPLES`."""
    async with AsyncExitStack() as stack:
        rigs = []
        for number, sample in enumerate(SAMPLES):
            folder = scratch / f"router-{number}"
            folder.mkdir()
            flags = {} if sample is None else {"traces.endpoint": endpoint, "traces.sample": sample}
            rig = await stack.enter_async_context(Rig(4, 20_000.0, folder, settings=flags))
            await rig.load(1, rate=rate, duration=2, max_tokens=16, prefix="warm")
            rigs.append(rig)
        found = []
        for turn in range(rounds):
            costs = [0.0] * len(rigs)
            for number in _order(turn):
                measured = await rigs[number].load(1, rate=rate, duration=duration_s, max_tokens=16, prefix=f"r{turn}-")
                if measured.num_failed:
                    raise Internal(f"{measured.num_failed} requests failed, such as: {measured.failure}")
                costs[number] = measured.cpu_ms_per_request
            found.append(costs)
        return found


async def step_costs(endpoint: str, rounds: int, in_flight: int, duration_s: float, scratch: Path) -> list[list[float]]:
    """For each round a decode worker's time a step, milliseconds, by `SAMPLES`."""
    async with AsyncExitStack() as stack:
        clusters = []
        for number, sample in enumerate(SAMPLES):
            spec = ClusterSpec(
                model=DEMO,
                http="127.0.0.1:0",
                grpc="127.0.0.1:0",
                num_kv_blocks=2048,
                state_dir=scratch / f"cluster-{number}",
                traces_endpoint="" if sample is None else endpoint,
                traces_sample=sample,
            )
            cluster = await stack.enter_async_context(LocalCluster(spec))
            await _load(cluster, in_flight, 1.0, scratch, f"warm{number}")
            clusters.append(cluster)
        found = []
        for turn in range(rounds):
            costs = [0.0] * len(clusters)
            for number in _order(turn):
                before = await _steps(clusters[number])
                await _load(clusters[number], in_flight, duration_s, scratch, f"s{turn}")
                after = await _steps(clusters[number])
                costs[number] = 1e3 * (after.busy_s - before.busy_s) / max(1.0, after.num_steps - before.num_steps)
            found.append(costs)
        return found


def _order(turn: int) -> list[int]:
    """Another one begins each round, so that a drift of the machine is nobody's."""
    numbers = list(range(len(SAMPLES)))
    return numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]


async def _steps(cluster: LocalCluster) -> Steps:
    async with httpx.AsyncClient(timeout=START_S) as http:
        page = (await http.get(f"http://{cluster.metrics['decode-0']}/metrics")).text

    def value(name: str) -> float:
        found = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
        if found is None:
            raise Internal(f"the metrics page has no {name}")
        return float(found[1])

    return Steps(value("tandem_engine_steps_total"), value("tandem_engine_step_seconds_total"))


async def _load(cluster: LocalCluster, in_flight: int, duration_s: float, scratch: Path, prefix: str) -> None:
    """Streams answers of 64 tokens, this many at once."""
    flags = {
        "target": cluster.grpc, "prompt-tokens": 64, "max-tokens": 64, "in-flight": in_flight, "duration": duration_s,
        "prefix": prefix, "out": scratch / "client.json",
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    command = [sys.executable, "-m", "loadtest.bench.router.client", *arguments]
    client = ChildProcess("client", command, scratch / "client.log")
    await client.start()
    if await client.wait(CLIENT_S) != 0:
        raise Internal(f"the client ended with {client.exit_text()}: {client.log_tail()}")


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
    return [
        *results_of("router's processor time a request", "ms", router),
        *results_of(f"decode step, {in_flight} answers", "ms", steps),
    ]


def main(
    out: Out = None,
    rounds: Annotated[int, typer.Option(help="rounds; each loads all four in turn")] = 9,
    rate: Annotated[float, typer.Option(help="requests per second of the router's part")] = 200.0,
    in_flight: Annotated[int, typer.Option(help="answers at once of the decode step's part")] = 8,
    duration: Annotated[float, typer.Option(help="seconds a load")] = 5.0,
) -> None:
    """Measure what traces cost a router and a decode worker."""
    print(machine())
    results = asyncio.run(measure_all(rounds, rate, in_flight, duration))
    print(table(results))
    if out is not None:
        write(out, results)
