"""What the commands share: run with a progress line, write, stop at Ctrl-C."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import uvloop

from loadtest.clients.connect import make_client
from loadtest.clients.target import parse_target
from loadtest.config import LoadConfig
from loadtest.driver.collector import Collector
from loadtest.report import render_run, render_sweep
from loadtest.rig.results import write_json, write_text
from loadtest.run import Plan, RunResult, execute, plan_run
from loadtest.run_folder import REPORT, REQUESTS, SUMMARY, SWEEP, prepare_folder, write_requests
from loadtest.summary import summarize
from loadtest.sweep import Sweep

EXIT_OK, EXIT_INTERRUPTED = 0, 130
EXIT_DOUBTFUL = 1
"""Results were written, but they are partial or invalid."""

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


_LOG_EVERY_S = 10.0
_FIRST_LOG_S = 1.0


class ProgressLine:
    """Plain writes: a rich live display redraws from its own thread and delays the schedule by milliseconds."""

    def __init__(
        self, stream: TextIO, duration_s: float | None, slo_given: bool, title: str = "", log: bool = True
    ) -> None:
        """With `log` False the line is written to terminals only."""
        self._stream = stream
        self._duration_s = duration_s
        self._slo_given = slo_given
        self._title = f"{title}: " if title else ""
        self._in_place = stream.isatty()
        self._next_log_s = _FIRST_LOG_S if log else math.inf
        self._last_len = 0

    def __call__(self, collector: Collector) -> None:
        """Shows the current counts."""
        if self._in_place:
            text = self._text(collector)
            self._stream.write("\r" + text.ljust(self._last_len))
            self._stream.flush()
            self._last_len = len(text)
        elif collector.now_s >= self._next_log_s:
            self._next_log_s = collector.now_s + _LOG_EVERY_S
            self._stream.write(self._text(collector) + "\n")
            self._stream.flush()

    def end(self) -> None:
        """Ends the line, so that later output starts on a new one."""
        if self._in_place and self._last_len:
            self._stream.write("\n")
            self._stream.flush()

    def _text(self, collector: Collector) -> str:
        now_s = collector.now_s
        clock = (
            f"{now_s:.0f} s"
            if self._duration_s is None
            else f"{min(now_s, self._duration_s):.0f}/{self._duration_s:.0f} s"
        )
        counts = f"sent {collector.num_sent}, in flight {collector.num_in_flight}, failed {collector.num_failed}"
        num_ended = collector.num_done + collector.num_failed
        if not self._slo_given:
            return f"{self._title}{clock}: {counts}, done {collector.num_done}"
        share = f"{collector.num_good / num_ended:.0%}" if num_ended else "-"
        rate = collector.num_good / now_s if now_s > 0 else 0.0
        return f"{self._title}{clock}: {counts}, goodput so far {rate:.2f} req/s ({share})"
