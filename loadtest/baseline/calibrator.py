"""Finds a workload's targets, capacity and chunk budgets by windows on the systems themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from loadtest.baseline.calibration import (
    IN_TIME,
    NUM_REQUESTS,
    USERS_A_WORKER,
    Capacity,
    Sample,
    best_of,
    busy_rate,
    capacity_from,
    rates_up_to,
    targets_from,
)
from loadtest.baseline.design import TIME, Design, with_chunk
from loadtest.baseline.systems import Candidate
from loadtest.baseline.windows import Calibrated
from loadtest.baseline.workloads import run_config, seed_of, window_plan
from loadtest.config import Traffic
from loadtest.rate_search import Point, next_rate
from loadtest.records import RequestRecord
from loadtest.run import Plan, RunResult, plan_run
from loadtest.schedule import Limits
from loadtest.slo import Slo
from loadtest.summary import summarize
from loadtest.sweep import point_of

Measured = Callable[[Candidate, Plan, str], Awaitable[RunResult | None]]
"""One window of a candidate, with the name of its place; None where the study was stopped."""


@dataclass(frozen=True, slots=True)
class Calibrator:
    """Calibrates one workload after the other."""

    design: Design
    measured: Measured

    async def calibrate(self, name: str) -> Calibrated | None:
        """Targets, capacity and chunk budgets of a workload; None where it was stopped."""
        design, spec = self.design, self.design.workloads[name]
        first = design.calibrated
        slo = design.slo
        if slo is None:
            alone = await self._closed(first, spec, name, 1, Limits(num_requests=NUM_REQUESTS))
            if alone is None:
                return None
            slo = targets_from(alone.records)
        users = USERS_A_WORKER * design.collocated.num_workers
        busy = await self._closed(first, spec, name, users, Limits(duration_s=design.busy_s))
        if busy is None:
            return None
        capacity = await self._capacity(name, spec, slo, busy_rate(busy.records, busy.duration_s))
        if capacity is None:
            return None
        found = Calibrated(name, spec, slo, capacity, {})
        best = await self._best_chunks(found)
        if best is None:
            return None
        return replace(found, chunks=best)

    async def _closed(self, candidate: Candidate, spec: str, name: str, users: int, limits: Limits) -> RunResult | None:
        seed = seed_of(self.design.seed, name, users)
        config = run_config(spec, None, Traffic(concurrency=users), limits, seed, self.design.vocab_size)
        plan = plan_run(config)
        if users == 1:
            plan = replace(plan, workload=Sample(plan.workload))
        return await self.measured(candidate, plan, f"{name}, {users} at a time")

    async def _capacity(self, name: str, spec: str, slo: Slo, busy: float) -> Capacity | None:
        """What the collocated system serves in time; None where the study was stopped."""
        design = self.design
        chunk = TIME if TIME in design.chunks else design.chunks[-1]
        candidate, space = with_chunk(design.collocated, chunk, slo), rates_up_to(busy)
        size = replace(design.size, num_requests=2 * design.size.num_requests)
        points: list[Point] = []
        while (rate := next_rate(space, points)) is not None:
            tries: list[Point] = []
            # What the machine does besides only makes a window worse, so a rate that missed has a second one.
            while len(tries) < 2 and all(point.attainment < IN_TIME for point in tries):
                seed = seed_of(design.seed, name, "capacity", rate, len(tries))
                plan = window_plan(spec, slo, rate, size, seed, design.vocab_size)
                result = await self.measured(candidate, plan, f"{name}, {rate:g} req/s")
                if result is None:
                    return None
                tries.append(point_of(rate, summarize(result)))
            points.append(max(tries, key=lambda point: point.attainment))
        return capacity_from(points)

    async def _best_chunks(self, found: Calibrated) -> dict[str, str] | None:
        """Each fixed system's best chunk budget, by one window at the highest load; None where it was stopped."""
        design = self.design
        if len(design.chunks) == 1:
            return dict.fromkeys((system.name for system in design.fixed), design.chunks[0])
        rate = max(design.loads) * found.capacity.rate
        seed = seed_of(design.seed, found.name, "chunks")
        plan = window_plan(found.spec, found.slo, rate, design.size, seed, design.vocab_size)
        best = {}
        for system in design.fixed:
            tried: dict[str, Sequence[RequestRecord]] = {}
            for chunk in design.chunks:
                candidate = with_chunk(system, chunk, found.slo)
                result = await self.measured(candidate, plan, f"{found.name} {candidate.name}")
                if result is None:
                    return None
                tried[chunk] = result.records
            best[system.name] = best_of(tried, found.slo)
        return best
