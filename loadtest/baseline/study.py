"""Measures every system under every workload, with every chunk budget, within a given time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from loadtest.baseline.calibration import NUM_REQUESTS, Alone, Sample
from loadtest.baseline.interleaved import Candidate, InterleavedSearch, best_of_each_system, rate_for_all
from loadtest.baseline.systems import SYSTEMS, System, make_cluster
from loadtest.commands import measure_into, measure_plan, write_sweep
from loadtest.config import LoadConfig, Traffic
from loadtest.rate_search import Point, SearchSpace
from loadtest.results import prepare_folder
from loadtest.run import RunResult, plan_run
from loadtest.schedule import Limits
from loadtest.slo import format_ms
from loadtest.sweep import Sweep
from loadtest.tables import point_text


@dataclass(slots=True)
class Budget:
    """A time budget. All times are seconds of the caller's clock."""

    ends_s: float
    weights: list[float]
    """Relative share of the time of each search, in order."""
    reserved_s: list[float] = field(default_factory=list)
    """Time between searches without measurements, one entry for each remaining occurrence."""

    def next_deadline(self, now_s: float) -> float:
        """When the next search has to end. Time that a search did not need goes to the later ones."""
        weight = self.weights.pop(0)
        left_s = self.ends_s - now_s - sum(self.reserved_s)
        return now_s + max(left_s, 0.0) * weight / (weight + sum(self.weights))


_FEW_REQUESTS = 8
_STOP_S = 10.0
"""Time to stop the clusters and write the report. Seconds."""
_LATER_CHUNKS_WEIGHT = 0.4
"""Time of a further search relative to a first one: mostly one point shows that another chunk budget is not better."""


@dataclass(frozen=True, slots=True)
class Study:
    """The configuration of a study."""

    model: Path
    configs: Sequence[tuple[str, LoadConfig]]
    """A folder's name and a config without a target, for each workload."""
    space: SearchSpace
    start_rate: float | None
    """First rate, requests per second; None: calibrated."""
    chunk_lens: Sequence[int]
    """Chunk budgets to try, in tokens a step."""
    num_kv_blocks: int
    """Blocks of all workers of a system together."""
    out: Path
    budget_s: float
    """Time for everything, including the start of the clusters."""


@dataclass(slots=True)
class _Workload:
    """A workload and its candidates so far."""

    name: str
    config: LoadConfig
    space: SearchSpace
    candidates: list[Candidate]


async def run_study(study: Study, stop: asyncio.Event) -> dict[str, list[Candidate]]:
    """Measures all systems with all chunk budgets, by workload; if `stop` is set, ends early with the results so far.

    All systems of a chunk budget run at once and are measured in turns. The search for the first chunk budget starts
    at the calibrated rate, those for the others at the best result of each system.
    """
    started_s = time.perf_counter()
    workloads = [_Workload(name, config, study.space, []) for name, config in study.configs]
    first, *later = [study.chunk_lens[0], *study.chunk_lens[1:]]
    budget = Budget(
        ends_s=started_s + study.budget_s - _STOP_S,
        weights=[1.0] * len(workloads) + [_LATER_CHUNKS_WEIGHT] * len(later) * len(workloads),
    )
    for chunk_len in (first, *later):
        begun_s = time.perf_counter()
        if chunk_len != first and not _time_for_more(study, budget, begun_s):
            print(f"chunks of {chunk_len} are skipped: the time is up", flush=True)
            break
        async with AsyncExitStack() as stack:
            addresses = {}
            for system in SYSTEMS:
                if stop.is_set():
                    break
                cluster = make_cluster(system, study.model, chunk_len, study.num_kv_blocks, study.out)
                addresses[system.name] = (await stack.enter_async_context(cluster)).http
            if stop.is_set():
                break
            if chunk_len == first:
                # Expect the next start to take as long.
                budget.reserved_s = [time.perf_counter() - begun_s] * len(later)
                for workload in workloads:
                    await _calibrate(study, workload, addresses, stop)
            else:
                budget.reserved_s.pop()
            for workload in workloads:
                if not stop.is_set():
                    await _measure_workload(study, workload, chunk_len, addresses, budget, stop)
    return {workload.name: [e for e in workload.candidates if e.sweep.points] for workload in workloads}


def _time_for_more(study: Study, budget: Budget, now_s: float) -> bool:
    """Whether another start of the clusters and one point each fit."""
    points_s = sum(config.limits.duration_s or 0.0 for _, config in study.configs) * len(SYSTEMS)
    return now_s + budget.reserved_s[-1] + points_s <= budget.ends_s


async def _measure_workload(
    study: Study,
    workload: _Workload,
    chunk_len: int,
    addresses: dict[str, str],
    budget: Budget,
    stop: asyncio.Event,
) -> None:
    """Measures one workload with one chunk budget."""
    earlier = {candidate.system.name: candidate for candidate in best_of_each_system(workload.candidates)}
    candidates = []
    for system in SYSTEMS:
        space = workload.space
        if system.name in earlier:
            space = _space_above(space, earlier[system.name])
        candidates.append(_candidate(study, workload, system, chunk_len, addresses[system.name], space, stop))
    workload.candidates += candidates
    asked = f"{workload.config.workload}, {workload.config.slo}"
    print(f"{workload.name}, chunks of {chunk_len}: {asked}", flush=True)

    def on_point(candidate: Candidate, point: Point) -> None:
        write_sweep(candidate.folder, candidate.sweep)
        name = f"  {candidate.system.title}: {point.rate:g} req/s"
        print(point_text(name, point, candidate.sweep.rows[-1]), flush=True)

    point_s = workload.config.limits.duration_s or 0.0
    search = InterleavedSearch(candidates, on_point, point_s)
    deadline_s = budget.next_deadline(time.perf_counter())
    if not earlier:
        await search.search(deadline_s, points_after=len(candidates) - 1)
        await search.at_rate(rate_for_all(candidates))
        return
    await search.search(deadline_s)
    better = [candidate for candidate in candidates if candidate.goodput > earlier[candidate.system.name].goodput]
    await InterleavedSearch(better, on_point, point_s).at_rate(rate_for_all(list(earlier.values())))


def _space_above(space: SearchSpace, best: Candidate) -> SearchSpace:
    """A search from just above a system's limit: one point there shows whether another chunk budget is better."""
    if best.best is None:
        return space
    higher = min(float(f"{best.best.rate * (1 + space.tolerance):.4g}"), space.max_rate)
    return replace(space, start_rate=higher, min_rate=higher)


def _candidate(
    study: Study,
    workload: _Workload,
    system: System,
    chunk_len: int,
    address: str,
    space: SearchSpace,
    stop: asyncio.Event,
) -> Candidate:
    folder = study.out / workload.name / f"{system.name}-chunk-{chunk_len}"
    prepare_folder(folder)
    label = f"{system.title}, chunks of {chunk_len}"

    async def run_point(point_config: LoadConfig, name: str) -> RunResult:
        return await measure_into(folder / name, point_config, "", stop, title=f"{label}, {name}", log=False)

    config = replace(workload.config, target=f"http://{address}", label=label)
    return Candidate(system, chunk_len, folder, Sweep(config, space), run_point)


async def _calibrate(study: Study, workload: _Workload, addresses: dict[str, str], stop: asyncio.Event) -> None:
    """Sets the targets and the first rate if they are not given, by one request at a time on half the machine."""
    if stop.is_set() or (workload.config.slo is not None and study.start_rate is not None):
        return
    pair = next(system for system in SYSTEMS if system.name == "collocated-2")
    config = replace(
        workload.config,
        target=f"http://{addresses[pair.name]}",
        traffic=Traffic(concurrency=1),
        limits=Limits(num_requests=NUM_REQUESTS),
    )
    plan = plan_run(config)
    sample = replace(plan, workload=Sample(plan.workload))
    result = await measure_plan(sample, "", stop, title=f"{workload.name}, calibration", log=False)
    if result.stopped:
        return
    alone = Alone.of(result.records)
    slo = workload.config.slo or alone.slo()
    rate = study.start_rate or alone.start_rate(pair.num_workers)
    workload.config = replace(workload.config, slo=slo, traffic=workload.config.traffic.with_rate(rate))
    workload.space = replace(workload.space, start_rate=rate, min_rate=min(workload.space.min_rate, rate))
    tpot = "" if alone.tpot_s is None else f", TPOT p50 {format_ms(alone.tpot_s)}"
    print(
        f"{workload.name}, one request at a time: TTFT at most {format_ms(alone.ttft_s)}{tpot}, "
        f"E2E mean {format_ms(alone.e2e_s)}; targets {slo}, from {rate:g} req/s",
        flush=True,
    )
    expected = rate * (workload.config.limits.duration_s or 0.0)
    if expected < _FEW_REQUESTS:
        print(
            f"only some {expected:.0f} requests a point: a share of 90 % is imprecise; "
            "use a longer --duration or a smaller --shape",
            flush=True,
        )
