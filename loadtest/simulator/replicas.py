"""`python -m loadtest.simulator.replicas --trace FILE`: compares several routers over one fleet with a single one.

Requests are assigned to the routers at random. A router learns of the others' work only from the workers' reports; the
rarer they are, the older its view.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from loadtest import command_line
from loadtest.command_line import Out, decimals, integers
from loadtest.figures import Result, write
from loadtest.markdown import table
from loadtest.simulator.cli import FleetOptions, WorkerOptions, setup_of
from loadtest.simulator.outcome import Outcome
from loadtest.simulator.simulation import Setup, simulate
from loadtest.workloads.mooncake import read_mooncake
from loadtest.workloads.trace import TraceRequest, parse_slice, slice_requests


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation: the fleet's size, its load, the number of routers and the age of their views."""

    num_workers: int
    """Number of workers of each role."""
    load: float
    """Requests per second for each prefill worker."""
    num_routers: int
    report_s: float
    """Minimum time between two load reports of a worker."""

    @property
    def title(self) -> str:
        """The case's name in the table."""
        routers = "1 router" if self.num_routers == 1 else f"{self.num_routers} routers"
        return f"{routers}, reports every {self.report_s * 1e3:g} ms"


def cases(sizes: Sequence[int], loads: Sequence[float], num_routers: int, stale_s: float) -> list[Case]:
    """The cases by group; in each group first a single router with fresh views."""
    kinds = ((1, 0.005), (1, stale_s), (num_routers, 0.005), (num_routers, stale_s))
    return [Case(size, load, *kind) for size in sizes for load in loads for kind in kinds]


def run(trace: Sequence[TraceRequest], case: Case, setup: Setup) -> Outcome:
    """Runs one simulation."""
    rate = len(trace) / (trace[-1].at_s - trace[0].at_s)
    fleet = replace(
        setup,
        worker=replace(setup.worker, report_s=case.report_s),
        num_prefills=case.num_workers,
        num_decodes=case.num_workers,
        num_routers=case.num_routers,
    )
    return simulate(trace, case.load * case.num_workers / rate, "tandem", fleet)


def replica_table(rows: Sequence[tuple[Case, Outcome, float]]) -> str:
    """A Markdown table; a row's third item is its goodput over that of the single router with fresh views."""
    columns = ("workers of each role", "req/s", "", "goodput", "of the first", "prefix hits", "refused", "TTFT p90")
    cells = [
        (
            f"{case.num_workers}",
            f"{o.offered:.0f}",
            case.title,
            f"{o.goodput:.1f}",
            f"{share:.1%}",
            f"{o.hit_rate:.1%}",
            f"{o.refused:.1%}",
            f"{o.ttft_p90_s:.2f} s",
        )
        for case, o, share in rows
    ]
    return table(columns, cells, left=(2,))


def main(
    trace: Annotated[Path, typer.Option(help="Mooncake's JSON lines")],
    slice_: Annotated[str, typer.Option("--slice", help="START:END of the trace, seconds")] = "",
    workers: Annotated[str, typer.Option(help="workers of each role")] = "64 256",
    load: Annotated[str, typer.Option(help="requests per second for each prefill worker")] = "1.25 1.75",
    routers: Annotated[int, typer.Option()] = 8,
    report_ms: Annotated[float, typer.Option(help="minimum time between two reports, stale cases")] = 250.0,
    processes: Annotated[int, typer.Option(help="simulations to run in parallel")] = 1,
    out: Out = None,
) -> None:
    """Compare several routers over one fleet with a single one."""
    requests = slice_requests(read_mooncake(trace), parse_slice(slice_))
    setup = setup_of(WorkerOptions(), FleetOptions())
    todo = cases(integers(workers, "workers"), decimals(load, "load"), routers, report_ms / 1e3)
    with ProcessPoolExecutor(processes) as pool:
        outcomes = []
        for case, outcome in zip(todo, pool.map(run, [requests] * len(todo), todo, [setup] * len(todo)), strict=True):
            print(f"{case.num_workers} workers, {case.title}: {outcome.wall_s:.0f} s", file=sys.stderr, flush=True)
            outcomes.append(outcome)
    rows = []
    for number, (case, outcome) in enumerate(zip(todo, outcomes, strict=True)):
        rows.append((case, outcome, outcome.goodput / outcomes[number - number % 4].goodput))
    print(replica_table(rows))
    if out is not None:
        results = [
            Result(
                f"{case.num_workers} workers at {o.offered:.0f} req/s, {case.title}: goodput", o.goodput, "req/s",
                limit=o.offered, fraction=o.good_share, peer="1 router, fresh", ratio=share,
            )
            for case, o, share in rows
        ]  # fmt: skip
        write(out, results)


if __name__ == "__main__":
    command_line.run(main, name="python -m loadtest.simulator.replicas")
