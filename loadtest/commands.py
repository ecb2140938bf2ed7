"""What the commands share: run with a progress line, write, stop at Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from loadtest.clients.connect import make_client
from loadtest.clients.target import parse_target
from loadtest.config import LoadConfig
from loadtest.progress import ProgressLine
from loadtest.report import render_run, render_sweep
from loadtest.results import REPORT, REQUESTS, SUMMARY, SWEEP, prepare_folder, write_requests
from loadtest.rig.results import write_json, write_text
from loadtest.run import Plan, RunResult, execute, plan_run
from loadtest.summary import summarize
from loadtest.sweep import Sweep

EXIT_OK, EXIT_INTERRUPTED = 0, 130

T = TypeVar("T")


async def measure(config: LoadConfig, api_key: str, stop: asyncio.Event, title: str = "") -> RunResult:
    """One run with a progress line on stderr; raises what `execute` raises."""
    return await measure_plan(plan_run(config), api_key, stop, title)


async def measure_plan(plan: Plan, api_key: str, stop: asyncio.Event, title: str = "", log: bool = True) -> RunResult:
    """`measure` with a given plan; without `log` the progress line needs a terminal."""
    config = plan.config
    client = make_client(parse_target(config.target), config.model, api_key)
    progress = ProgressLine(sys.stderr, config.limits.duration_s, config.slo is not None, title, log)
    try:
        return await execute(plan, client, stop, progress)
    finally:
        progress.end()
        await client.close()


async def measure_into(folder: Path, config: LoadConfig, api_key: str, stop: asyncio.Event, title: str) -> RunResult:
    """`measure`, and the run's files in `folder`, which must not hold a run yet."""
    result = await measure(config, api_key, stop, title)
    prepare_folder(folder)
    write_run(folder, result)
    return result


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
    write_text(folder / REPORT, render_sweep(found))
    return found


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
