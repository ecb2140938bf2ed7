"""`python -m loadtest.bench traces`: what traces cost the router for a request, and a decode worker for a step.

Without a collector, with 1 % sampled and with all, in turns within the same processes: first a router over scripted
workers, for its processor time; then a cluster with the demo model, for its decode worker's steps. Given are the median
of the rounds' differences, and bounds of that median (`pairs.py`).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from loadtest.bench.traces.pairs import results_of
from loadtest.bench.traces.router_cost import router_costs
from loadtest.bench.traces.step_cost import step_costs
from loadtest.command_line import Out
from loadtest.figures import Result, machine, table, write
from shared.child_process import ChildProcess

START_S = 120.0


async def measure_all(router_rounds: int, step_rounds: int, rate: float, in_flight: int, turn_s: float) -> list[Result]:
    """Both parts, with one collector; none of the part with 0 rounds."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        sink = ChildProcess("sink", [sys.executable, "-m", "loadtest.bench.traces.sink"], scratch / "sink.log")
        await sink.start()
        try:
            endpoint = f"http://{(await sink.ready(START_S)).address}"
            if router_rounds:
                router = await router_costs(endpoint, router_rounds, rate, turn_s, scratch)
                results += results_of("router's processor time a request", "ms", router)
            if step_rounds:
                steps = await step_costs(endpoint, step_rounds, in_flight, scratch)
                results += results_of(f"decode step, {in_flight} answers", "ms", steps.engine)
                worker = f"decode worker's processor time a step, {in_flight} answers"
                results += results_of(worker, "ms", steps.process)
        finally:
            sink.kill()
            await sink.stop(START_S)
    return results


def main(
    out: Out = None,
    router_rounds: Annotated[int, typer.Option(help="rounds of the router's part; each has all three in turn")] = 25,
    step_rounds: Annotated[int, typer.Option(help="rounds of the decode step's part")] = 30,
    rate: Annotated[float, typer.Option(help="requests per second of the router's part")] = 200.0,
    in_flight: Annotated[int, typer.Option(help="answers at once of the decode step's part")] = 8,
    turn: Annotated[float, typer.Option(help="seconds of load a turn of the router's part")] = 1.0,
) -> None:
    """Measure what traces cost a router and a decode worker."""
    print(machine())
    results = asyncio.run(measure_all(router_rounds, step_rounds, rate, in_flight, turn))
    print(table(results))
    if out is not None:
        write(out, results)
