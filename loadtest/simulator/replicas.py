"""`python -m loadtest.simulator.replicas --trace FILE`: several routers over one fleet beside a single one.

The requests are dealt out to the routers at random. What a router knows of the others' work is in the workers' reports
alone; the more rarely they come, the older its view.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.figures import Result, write
from loadtest.markdown import table
from loadtest.simulator.cli import parser as simulator_parser
from loadtest.simulator.cli import setup_of
from loadtest.simulator.outcome import Outcome
from loadtest.simulator.simulation import Setup, simulate
from loadtest.workloads.mooncake import read_mooncake
from loadtest.workloads.trace import TraceRequest, parse_slice, slice_requests


@dataclass(frozen=True, slots=True)
class Case:
    """So many workers of either role at so many requests per second and worker, under routers with views so old."""

    num_workers: int
    load: float
    num_routers: int
    report_s: float

    @property
    def title(self) -> str:
        """For the table."""
        routers = "1 router" if self.num_routers == 1 else f"{self.num_routers} routers"
        return f"{routers}, reports every {self.report_s * 1e3:g} ms"


def cases(sizes: Sequence[int], loads: Sequence[float], num_routers: int, stale_s: float) -> list[Case]:
    """A single router with fresh views first in each group, then the others."""
    kinds = ((1, 0.005), (1, stale_s), (num_routers, 0.005), (num_routers, stale_s))
    return [Case(size, load, *kind) for size in sizes for load in loads for kind in kinds]


def run(trace: Sequence[TraceRequest], case: Case, setup: Setup) -> Outcome:
    """One simulation."""
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
    """Markdown; the last of a row is its goodput over that of the single router with fresh views."""
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


def main(argv: list[str] | None = None) -> None:
    """See the module."""
    made = argparse.ArgumentParser(prog="python -m loadtest.simulator.replicas", description=__doc__)
    add = made.add_argument
    add("--trace", type=Path, required=True, help="Mooncake's JSON lines")
    add("--slice", default="", help="START:END of the trace, seconds")
    add("--workers", type=int, nargs="+", default=[64, 256], help="of each role")
    add("--load", type=float, nargs="+", default=[1.25, 1.75], help="requests per second and prefill worker")
    add("--routers", type=int, default=8)
    add("--report-ms", type=float, default=250.0, help="least time between two reports of a worker, stale")
    add("--processes", type=int, default=1, help="simulations at once")
    add("--out", type=Path, help="where to write the results as JSON")
    args = made.parse_args(argv)
    trace = slice_requests(read_mooncake(args.trace), parse_slice(args.slice))
    setup = setup_of(simulator_parser().parse_args(["--trace", str(args.trace)]))
    todo = cases(args.workers, args.load, args.routers, args.report_ms / 1e3)
    with ProcessPoolExecutor(args.processes) as pool:
        outcomes = []
        for case, outcome in zip(todo, pool.map(run, [trace] * len(todo), todo, [setup] * len(todo)), strict=True):
            print(f"{case.num_workers} workers, {case.title}: {outcome.wall_s:.0f} s", file=sys.stderr, flush=True)
            outcomes.append(outcome)
    rows = []
    for number, (case, outcome) in enumerate(zip(todo, outcomes, strict=True)):
        rows.append((case, outcome, outcome.goodput / outcomes[number - number % 4].goodput))
    print(replica_table(rows))
    if args.out:
        results = [
            Result(
                f"{case.num_workers} workers at {o.offered:.0f} req/s, {case.title}: goodput", o.goodput, "req/s",
                limit=o.offered, fraction=o.good_share, peer="1 router, fresh", ratio=share,
            )
            for case, o, share in rows
        ]  # fmt: skip
        write(args.out, results)


if __name__ == "__main__":
    main()
