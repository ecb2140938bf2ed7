"""The commands' implementations: run, write, report."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from rich.console import Console

from loadtest.clients.connect import make_client
from loadtest.clients.target import parse_target
from loadtest.config import LoadConfig
from loadtest.progress import ProgressLine
from loadtest.rate_search import Point, SearchSpace
from loadtest.report import render_run, render_sweeps
from loadtest.results import (
    REPORT,
    REQUESTS,
    SUMMARY,
    SWEEP,
    prepare_folder,
    write_json,
    write_requests,
    write_text,
)
from loadtest.run import Plan, RunResult, execute, plan_run
from loadtest.summary import summarize
from loadtest.sweep import Sweep, config_at, run_sweep
from loadtest.tables import number, print_run

EXIT_OK, EXIT_DOUBTFUL, EXIT_REFUSED, EXIT_INTERRUPTED = 0, 1, 2, 130
"""Exit status: results were written, but they are partial or invalid."""

T = TypeVar("T")


def run_command(config: LoadConfig, out: Path, api_key: str, console: Console) -> int:
    """`run`: one run and its folder; the exit status."""
    plan_run(config)  # errors in the configuration show before a folder is made
    prepare_folder(out)
    console.print(
        f"{config.workload} → {config.target}, seed {config.seed}", highlight=False, markup=False, soft_wrap=True
    )
    result, interrupted = with_interrupt(lambda stop: measure(config, api_key, stop))
    summary = write_run(out, result)
    print_run(console, summary)
    console.print(f"report: {out / REPORT}", highlight=False, markup=False, soft_wrap=True)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_DOUBTFUL if summary["partial"] or summary["invalid"] else EXIT_OK


def sweep_command(
    config: LoadConfig, space: SearchSpace, rates: Sequence[float], out: Path, api_key: str, console: Console
) -> int:
    """`sweep`: a folder for each rate, and their summary; the exit status."""
    plan_run(config_at(config, rates[0] if rates else space.start_rate))
    prepare_folder(out)
    console.print(
        f"{config.workload} → {config.target}, seed {config.seed}", highlight=False, markup=False, soft_wrap=True
    )

    def on_point(sweep: Sweep, point: Point) -> None:
        write_sweep(out, sweep)
        mark = "" if point.valid else "  [red]invalid[/]"
        row = sweep.rows[-1]
        console.print(
            f"{point.rate:>8g} req/s: goodput {number(point.goodput)} req/s, attainment {point.attainment:.1%}, "
            f"TTFT p99 {number(row['p99_ttft_ms'])} ms, TPOT p99 {number(row['p99_tpot_ms'])} ms{mark}",
            highlight=False,
            soft_wrap=True,
        )

    async def all_points(stop: asyncio.Event) -> Sweep:
        async def run_point(point_config: LoadConfig, folder: str) -> RunResult:
            result = await measure(point_config, api_key, stop, title=folder)
            prepare_folder(out / folder)
            write_run(out / folder, result)
            return result

        return await run_sweep(config, space, rates, run_point, on_point)

    sweep, interrupted = with_interrupt(all_points)
    found = write_sweep(out, sweep)
    _print_sweep(console, found)
    console.print(f"report: {out / REPORT}", highlight=False, markup=False, soft_wrap=True)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_DOUBTFUL if found["partial"] else EXIT_OK


async def measure(
    config: LoadConfig, api_key: str, stop: asyncio.Event, title: str = "", log: bool = True
) -> RunResult:
    """One run with a progress line on stderr, which needs a terminal or `log`; raises what `execute` raises."""
    return await measure_plan(plan_run(config), api_key, stop, title, log)


async def measure_plan(plan: Plan, api_key: str, stop: asyncio.Event, title: str = "", log: bool = True) -> RunResult:
    """`measure` with a given plan."""
    config = plan.config
    client = make_client(parse_target(config.target), config.model, api_key)
    progress = ProgressLine(sys.stderr, config.limits.duration_s, config.slo is not None, title, log)
    try:
        return await execute(plan, client, stop, progress)
    finally:
        progress.end()
        await client.close()


def write_run(folder: Path, result: RunResult) -> dict[str, Any]:
    """A run's three files; returns the summary."""
    summary = summarize(result)
    write_requests(folder / REQUESTS, result.records)
    write_json(folder / SUMMARY, summary)
    write_text(folder / REPORT, render_run(summary, result.records))
    return summary


def write_sweep(folder: Path, sweep: Sweep) -> dict[str, Any]:
    """A sweep's own two files; returns the content of `sweep.json`."""
    found = sweep.as_json()
    write_json(folder / SWEEP, found)
    write_text(folder / REPORT, render_sweeps(found["label"] or found["workload"], {"": found}))
    return found


def _print_sweep(console: Console, found: dict[str, Any]) -> None:
    best, bend = found["max_goodput"], found["knee"]
    wanted = f"{found['wanted_attainment']:.0%}"
    if found["partial"]:
        console.print(f"[bold yellow]PARTIAL[/]: {found['partial_reason']}")
    if best is None:
        console.print(f"no measured rate met the targets for {wanted} of the requests")
        return
    limit = "" if found["limit_found"] else "; no rate missed the targets, so the limit is higher"
    console.print(
        f"[bold]max goodput at ≥ {wanted}: {number(best['goodput'])} req/s[/] "
        f"({best['attainment']:.1%} of {number(best['offered_rate'])} req/s offered{limit})",
        highlight=False,
        soft_wrap=True,
    )
    if bend is not None:
        console.print(f"knee at {number(bend['offered_rate'])} req/s offered", highlight=False)


def with_interrupt(work: Callable[[asyncio.Event], Awaitable[T]]) -> tuple[T, bool]:
    """Runs `work` on an event loop; Ctrl-C sets its event, a second Ctrl-C ends the process."""

    async def main() -> tuple[T, bool]:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            stop.set()
            for name in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(name)

        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, on_signal)
        return await work(stop), stop.is_set()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
