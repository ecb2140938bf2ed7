"""Measures every system under every workload, and keeps each system's best chunk budget."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from loadtest.baseline.systems import SYSTEMS, System, make_cluster
from loadtest.commands import measure, write_run, write_sweep
from loadtest.config import LoadConfig, Traffic
from loadtest.metrics import request_metrics
from loadtest.rate_search import Point, SearchSpace, highest_at
from loadtest.results import prepare_folder
from loadtest.run import RunResult
from loadtest.schedule import Limits
from loadtest.slo import Slo
from loadtest.sweep import Sweep, run_sweep
from loadtest.tables import number
from loadtest.units import format_ms
from shared.errors import WorkerLost

_CALIBRATION_REQUESTS = 8
_TTFT_FACTOR, _TPOT_FACTOR = 2.0, 2.0


@dataclass(frozen=True, slots=True)
class Study:
    """What is measured, and how."""

    model: Path
    configs: Sequence[tuple[str, LoadConfig]]
    """A folder's name and a config without a target, for each workload."""
    space: SearchSpace
    chunk_lens: Sequence[int]
    """Chunk budgets to try, in tokens a step."""
    num_kv_blocks: int
    """Of all workers of a system together."""
    out: Path
    state_dir: Path


@dataclass(frozen=True, slots=True)
class Measured:
    """A system's best sweep under one workload."""

    system: System
    chunk_len: int
    folder: Path
    sweep: Sweep


async def run_study(study: Study, stop: asyncio.Event, console: Console) -> dict[str, list[Measured]]:
    """All systems under all workloads, best chunk budgets first found; workloads by name.

    The targets of a workload are calibrated once, on the collocated pair, unless the config has them. Ends early, with
    what there is, when `stop` is set.
    """
    measured: dict[str, list[Measured]] = {}
    for name, config in study.configs:
        if config.slo is None and not stop.is_set():
            config = replace(config, slo=await _calibrate(study, config, stop, console))
        if stop.is_set():
            break
        console.print(f"[bold]{name}[/]: {config.workload}, {config.slo}", highlight=False, soft_wrap=True)
        space = study.space
        for system in SYSTEMS:
            if stop.is_set():
                break
            best = await _best_budget(replace(study, space=space), system, name, config, stop, console)
            measured.setdefault(name, []).append(best)
            point = highest_at(best.sweep.points, space.attainment)
            if point is not None:
                # The systems are not worlds apart: the next one's search begins where this one's ended.
                space = replace(space, start_rate=point.rate)
    return measured


async def _best_budget(
    study: Study, system: System, workload: str, config: LoadConfig, stop: asyncio.Event, console: Console
) -> Measured:
    """A whole search with the first chunk budget; a further one is searched on only where it does better."""
    best: Measured | None = None
    space = study.space
    for chunk_len in study.chunk_lens:
        if stop.is_set() and best is not None:
            break
        folder = study.out / workload / f"{system.name}-chunk-{chunk_len}"
        found = Measured(
            system, chunk_len, folder, await _sweep(study, system, chunk_len, space, folder, config, stop, console)
        )
        if best is None or _goodput(found) > _goodput(best):
            best = found
        point = highest_at(best.sweep.points, space.attainment)
        if point is not None:
            higher = min(float(f"{point.rate * (1 + space.tolerance):.4g}"), space.max_rate)
            space = replace(space, start_rate=higher, min_rate=higher)
    assert best is not None, "there is at least one chunk budget"
    return best


def _goodput(measured: Measured) -> float:
    point = highest_at(measured.sweep.points, measured.sweep.space.attainment)
    return 0.0 if point is None else point.goodput


async def _sweep(
    study: Study,
    system: System,
    chunk_len: int,
    space: SearchSpace,
    folder: Path,
    config: LoadConfig,
    stop: asyncio.Event,
    console: Console,
) -> Sweep:
    prepare_folder(folder)
    label = f"{system.title}, chunks of {chunk_len}"

    async def run_point(point_config: LoadConfig, name: str) -> RunResult:
        result = await measure(point_config, "", stop, title=f"{label}, {name}")
        prepare_folder(folder / name)
        write_run(folder / name, result)
        return result

    def on_point(sweep: Sweep, point: Point) -> None:
        write_sweep(folder, sweep)
        row = sweep.rows[-1]
        console.print(
            f"  {label}: {point.rate:g} req/s → goodput {number(point.goodput)} ({point.attainment:.0%}), "
            f"TTFT p99 {number(row['p99_ttft_ms'])}, TPOT p99 {number(row['p99_tpot_ms'])} ms"
            + ("" if point.valid else " [red]invalid[/]"),
            highlight=False,
            soft_wrap=True,
        )

    async with make_cluster(system, study.model, chunk_len, study.num_kv_blocks, study.state_dir) as cluster:
        local = replace(config, target=f"http://{cluster.http}", label=label)
        return await run_sweep(local, space, (), run_point, on_point)


async def _calibrate(study: Study, config: LoadConfig, stop: asyncio.Event, console: Console) -> Slo | None:
    """Targets from what one request at a time takes on half the machine; None where that was stopped.

    TTFT: twice the p90, so that long prompts can make it; TPOT: twice the median.
    """
    pair = next(system for system in SYSTEMS if system.name == "collocated-2")
    chunk_len = study.chunk_lens[0]
    async with make_cluster(pair, study.model, chunk_len, study.num_kv_blocks, study.state_dir) as cluster:
        alone = replace(
            config,
            target=f"http://{cluster.http}",
            traffic=Traffic(concurrency=1),
            limits=Limits(num_requests=_CALIBRATION_REQUESTS),
        )
        result = await measure(alone, "", stop, title="calibration")
    figures = [metrics for record in result.records if (metrics := request_metrics(record)) is not None]
    if result.stopped:
        return None
    if not figures:
        raise WorkerLost("no request of the calibration was answered")
    ttfts, tpots = sorted(m.ttft_s for m in figures), sorted(m.tpot_s for m in figures if m.tpot_s is not None)
    ttft_s, tpot_s = ttfts[int(0.9 * (len(ttfts) - 1))], tpots[len(tpots) // 2] if tpots else None
    slo = Slo(_round(ttft_s * _TTFT_FACTOR), None if tpot_s is None else _round(tpot_s * _TPOT_FACTOR))
    console.print(
        f"one request at a time: TTFT p90 {format_ms(ttft_s)}"
        + ("" if tpot_s is None else f", TPOT p50 {format_ms(tpot_s)}")
        + f"; targets {slo}",
        highlight=False,
    )
    return slo


def _round(seconds: float) -> float:
    return float(f"{seconds:.2g}")
