"""`python -m loadtest`: the commands and their options."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

from loadtest import options
from loadtest.commands import (
    EXIT_DOUBTFUL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    measure,
    measure_into,
    with_interrupt,
    write_run,
    write_sweep,
)
from loadtest.config import LoadConfig
from loadtest.options import RunOptions
from loadtest.rate_search import Point, SearchSpace
from loadtest.rig.command_line import Command, Option, run_one_of
from loadtest.run import RunResult, plan_run
from loadtest.run_folder import REPORT, prepare_folder
from loadtest.sweep import Sweep, config_at, run_sweep
from loadtest.terminal_tables import point_text, run_text, sweep_text
from shared.errors import ConfigError

COMMANDS = {
    "run": Command("loadtest.cli:run", "Offer one workload once, and report latency and goodput."),
    "sweep": Command("loadtest.cli:sweep", "Find the highest rate at which enough requests meet both targets."),
    "baseline": Command("loadtest.baseline.cli:baseline", "Compare disaggregated with collocated on this machine."),
}

Out = Annotated[Path, Option("folder for the results")]


def run(
    load: RunOptions,
    out: Out,
    slo: options.Slo = None,
    rate: Annotated[float | None, Option("requests per second; scales a trace's own times")] = None,
    duration: options.Duration = None,
    concurrency: Annotated[int | None, Option("closed loop: number of users, each waiting for its answer")] = None,
    ramp_to: Annotated[float | None, Option("rate at the end of a ramp over --duration")] = None,
    speedup: Annotated[float | None, Option("replays a trace this many times as fast")] = None,
) -> int:
    """Offer one workload once, and report latency and goodput."""
    config = load.config(slo, load.traffic(rate, ramp_to, speedup, concurrency), load.limits(duration))
    api_key = load.api_key()
    plan_run(config)  # errors in the configuration show before a folder is made
    _begin(config, out)
    result, interrupted = with_interrupt(lambda stop: measure(config, api_key, stop))
    summary = write_run(out, result)
    print(run_text(summary))
    return _end(out, interrupted, doubtful=summary["partial"] or summary["invalid"])


def sweep(
    load: RunOptions,
    slo: Annotated[str, Option("targets with units: ttft=200ms,tpot=30ms")],
    out: Out,
    duration: options.Duration = "60s",
    rate: Annotated[float, Option("first rate of the search, requests per second")] = 1.0,
    rate_min: Annotated[float, Option("lowest rate of the search")] = 0.05,
    rate_max: Annotated[float, Option("highest rate of the search")] = 1000.0,
    rates: Annotated[str, Option("measure these instead of searching: 1,2,4")] = "",
    attainment: Annotated[float, Option("percent of the offered requests that must be good")] = 90.0,
    tolerance: Annotated[float, Option("percent by which the result may be below the true limit")] = 10.0,
    max_points: Annotated[int, Option("maximum number of rates to measure")] = 12,
) -> int:
    """Find the maximum goodput: the highest rate at which enough requests meet both targets."""
    space = SearchSpace(rate, rate_min, rate_max, attainment / 100, tolerance / 100, max_points)
    config = load.config(slo, load.traffic(rate), load.limits(duration))
    api_key, given = load.api_key(), _rates(rates)
    plan_run(config_at(config, given[0] if given else space.start_rate))
    _begin(config, out)

    def on_point(sweep: Sweep, point: Point) -> None:
        write_sweep(out, sweep)
        print(point_text(f"{point.rate:>8g} req/s", point, sweep.rows[-1]), flush=True)

    async def all_points(stop: asyncio.Event) -> Sweep:
        async def run_point(point_config: LoadConfig, folder: str) -> RunResult:
            return await measure_into(out / folder, point_config, api_key, stop, title=folder)

        return await run_sweep(config, space, given, run_point, on_point)

    found, interrupted = with_interrupt(all_points)
    written = write_sweep(out, found)
    print(sweep_text(written))
    return _end(out, interrupted, doubtful=written["partial"])


def _begin(config: LoadConfig, out: Path) -> None:
    prepare_folder(out)
    print(f"{config.workload} → {config.target}, seed {config.seed}", flush=True)


def _end(out: Path, interrupted: bool, *, doubtful: bool) -> int:
    print(f"report: {out / REPORT}")
    return EXIT_INTERRUPTED if interrupted else EXIT_DOUBTFUL if doubtful else EXIT_OK


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"rates={text}: expected numbers such as 1,2,4", field="rates") from None
    if any(not 0 < rate < 1e6 for rate in rates):
        raise ConfigError(f"rates={text}: each must be above 0", field="rates")
    return sorted(set(rates))


def main() -> None:
    """The process's entry point."""
    run_one_of(COMMANDS, sys.argv[1:], "python -m loadtest")
