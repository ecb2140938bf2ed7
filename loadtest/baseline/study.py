"""Measures every system under the same windows of requests, in turns, within a given time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from loadtest.baseline.calibration import (
    BUSY_S,
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
from loadtest.baseline.fleet import Fleet
from loadtest.baseline.systems import Candidate, System
from loadtest.baseline.windows import Calibrated, Study, Window, WindowFile
from loadtest.baseline.workloads import WindowSize, run_config, seed_of, window_plan, with_other_prompts, write_trace
from loadtest.commands import measure_plan
from loadtest.config import Traffic
from loadtest.rate_search import Point, next_rate
from loadtest.records import RequestRecord
from loadtest.run import Plan, RunResult, plan_run
from loadtest.schedule import Limits
from loadtest.slo import Slo
from loadtest.summary import invalid_reasons, summarize
from loadtest.sweep import point_of
from shared.errors import WorkerLost

TIME = "time"
"""In place of a chunk budget: chunks as large as the router's target for TPOT allows."""
AGAIN = "-again"
"""Ends the name of a system's second turn in a round."""
_BETWEEN_S = 1.0
"""Between two windows, before any was measured: resuming a cluster, a warm-up request, the last answers."""
_STOP_S = 10.0
"""To stop the clusters and write the report."""


@dataclass(frozen=True, slots=True)
class Design:
    """What a study is to measure."""

    workloads: Mapping[str, str]
    """Specs by name."""
    loads: Sequence[float]
    """Shares of the capacity."""
    collocated: System
    splits: Sequence[System]
    """The other fixed systems."""
    adaptive: System | None
    """Compared with the best fixed one; it knows the targets. Or the system whose workers guess, likewise."""
    chunks: Sequence[str]
    """Budgets to try for every fixed system, or TIME."""
    rounds: int
    size: WindowSize
    slo: Slo | None
    """None: calibrated, for each workload."""
    seed: int
    vocab_size: int
    commit: str
    traces: Path | None = None
    warm_up: int = 0
    """Requests of each system before its first round in a process: routers and workers learn from the first some
    hundred, and calibration is with one system alone."""
    busy_s: float = BUSY_S
    """How long the collocated system is kept busy, to know where its capacity can be."""

    @property
    def fixed(self) -> tuple[System, ...]:
        """The systems that decide nothing."""
        return (self.collocated, *self.splits)

    @property
    def turns(self) -> dict[str, System]:
        """The systems of a round by the names of their turns. The collocated one has two, as far apart as can be."""
        adaptive = [] if self.adaptive is None else [self.adaptive]
        named = {system.name: system for system in (self.collocated, *adaptive, *self.splits)}
        return {**named, self.collocated.name + AGAIN: self.collocated}


def in_order(turns: Sequence[str], number: int) -> Sequence[str]:
    """A round's turns: A B C, then C B A, so that a drift that is even over two rounds favours none."""
    return turns if number % 2 == 0 else turns[::-1]


@dataclass(slots=True)
class Conductor:
    """Runs a study; what it measures goes to `study` and `file` at once."""

    design: Design
    study: Study
    file: WindowFile
    fleet: Fleet
    stop: asyncio.Event
    stopped: str = ""
    """Why it ended early; empty if it did not."""
    _cost_s: dict[tuple[str, float], float] = field(default_factory=dict)
    """The longest round of a cell so far."""

    async def run(self, budget_s: float) -> None:
        """Measures until all rounds are there or the time is over; each workload has an even part of what is left
        when it is calibrated."""
        ends_s = time.perf_counter() + budget_s - _STOP_S
        names = list(self.design.workloads)
        for number, name in enumerate(names):
            if not self._ended:
                await self._workload(name, ends_s, len(names) - number)

    @property
    def _ended(self) -> bool:
        if self.stop.is_set() and not self.stopped:
            self.stopped = "stopped by the user"
        return bool(self.stopped)

    async def _workload(self, name: str, ends_s: float, num_left: int) -> None:
        found = self.study.workloads.get(name) or await self._calibrate(name)
        if found is None:
            return
        # Its part begins here: the first one's calibration started clusters for all.
        begins_s = time.perf_counter()
        deadline_s = begins_s + max(ends_s - begins_s, 0.0) / num_left
        print(f"{name}: {found.spec}, {found.slo}, capacity {found.capacity}, chunks {_listed(found.chunks)}")
        candidates = {turn: self._candidate(found, system) for turn, system in self.design.turns.items()}
        for candidate in dict.fromkeys(candidates.values()) if self.design.warm_up else ():
            await self._warm_up(found, candidate)
        while await self._next_rounds(found, candidates, deadline_s):
            pass
        await self.fleet.keep({self._calibrated})  # the next workload has other targets

    async def _warm_up(self, found: Calibrated, candidate: Candidate) -> None:
        size = WindowSize(self.design.warm_up, 0.0)
        seed = seed_of(self.design.seed, found.name, "warm-up")
        plan = window_plan(found.spec, found.slo, found.capacity.rate, size, seed, self.design.vocab_size)
        await self._measured(candidate, plan, f"{found.name} {candidate.name}, warm-up")

    async def _next_rounds(self, found: Calibrated, candidates: Mapping[str, Candidate], deadline_s: float) -> bool:
        """One more round of each load for which there is time; whether there was any."""
        measured = False
        for load in self.design.loads:
            number = self.study.next_round(found.name, load, list(candidates))
            guess_s = len(candidates) * (self.design.size.seconds(load * found.capacity.rate) + _BETWEEN_S)
            cost_s = self._cost_s.get((found.name, load), guess_s)
            if self._ended or number >= self.design.rounds or time.perf_counter() + cost_s > deadline_s:
                continue
            begun_s = time.perf_counter()
            measured |= await self._round(found, load, number, candidates)
            took_s = time.perf_counter() - begun_s
            self._cost_s[found.name, load] = max(self._cost_s.get((found.name, load), 0.0), took_s)
        return measured

    async def _round(self, found: Calibrated, load: float, number: int, candidates: Mapping[str, Candidate]) -> bool:
        """Every turn of a round that is missing; False where it was stopped."""
        design = self.design
        seed = seed_of(design.seed, found.name, number)
        plan = window_plan(found.spec, found.slo, load * found.capacity.rate, design.size, seed, design.vocab_size)
        if design.traces is not None and plan.schedule is not None:
            write_trace(design.traces / f"{found.name}-{load:g}-{number}.jsonl", plan.schedule)
        counts = []
        for turn in in_order(list(candidates), number):
            if self.study.has(found.name, load, number, turn):
                continue
            place = f"{found.name} {load:g} {turn}, round {number + 1}"
            result = await self._measured(candidates[turn], plan, place)
            if result is None:
                return False
            place_of = {"workload": found.name, "load": load, "round": number, "turn": turn}
            chunk = found.chunks.get(candidates[turn].system.name, TIME)
            window = Window.of(result, found.slo, chunk=chunk, commit=design.commit, **place_of)
            self.file.add_window(window)
            self.study.windows.append(window)
            counts.append(f"{turn} {window.good.count('1')}{'' if window.valid else ' (invalid)'}")
        offered = 0 if plan.schedule is None else plan.schedule.num_requests
        print(f"  {load:g}, round {number + 1} of {design.rounds}, good of {offered}: {', '.join(counts)}", flush=True)
        return True

    async def _measured(self, candidate: Candidate, plan: Plan, place: str) -> RunResult | None:
        """One window; once more if the generator was late, as another process may have taken its core for a moment.
        None where it was stopped, with the reason in `stopped`."""
        result = None
        for attempt in range(2):
            if self._ended:
                return None
            tokens_seed = seed_of(self.design.seed, place, attempt)
            async with self.fleet.awake(candidate) as target:
                asked = with_other_prompts(plan, tokens_seed)
                asked = replace(asked, config=replace(asked.config, target=target, label=place))
                result = await measure_plan(asked, "", self.stop, title=place, log=False)
            if result.stopped:
                self.stopped = result.stopped
                return None
            if not invalid_reasons(result):
                break
        return result

    async def _calibrate(self, name: str) -> Calibrated | None:
        """Targets, capacity and chunk budgets of a workload; None where it was stopped."""
        design, spec = self.design, self.design.workloads[name]
        first = self._calibrated
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
        found = replace(found, chunks=best)
        self.file.add_workload(found)
        self.study.workloads[name] = found
        return found

    async def _closed(self, candidate: Candidate, spec: str, name: str, users: int, limits: Limits) -> RunResult | None:
        seed = seed_of(self.design.seed, name, users)
        config = run_config(spec, None, Traffic(concurrency=users), limits, seed, self.design.vocab_size)
        plan = plan_run(config)
        if users == 1:
            plan = replace(plan, workload=Sample(plan.workload))
        return await self._measured(candidate, plan, f"{name}, {users} at a time")

    async def _capacity(self, name: str, spec: str, slo: Slo, busy: float) -> Capacity | None:
        """What the collocated system serves in time; None where the study was stopped."""
        design = self.design
        chunk = TIME if TIME in design.chunks else design.chunks[-1]
        candidate, space = self._with_chunk(design.collocated, chunk, slo), rates_up_to(busy)
        size = replace(design.size, num_requests=2 * design.size.num_requests)
        points: list[Point] = []
        while (rate := next_rate(space, points)) is not None:
            tries: list[Point] = []
            # What the machine does besides only makes a window worse, so a rate that missed has a second one.
            while len(tries) < 2 and all(point.attainment < IN_TIME for point in tries):
                seed = seed_of(design.seed, name, "capacity", rate, len(tries))
                plan = window_plan(spec, slo, rate, size, seed, design.vocab_size)
                result = await self._measured(candidate, plan, f"{name}, {rate:g} req/s")
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
                candidate = self._with_chunk(system, chunk, found.slo)
                result = await self._measured(candidate, plan, f"{found.name} {candidate.name}")
                if result is None:
                    return None
                tried[chunk] = result.records
            best[system.name] = best_of(tried, found.slo)
        return best

    @property
    def _calibrated(self) -> Candidate:
        """What targets and the busy rate are measured with: it refuses nothing, and serves every workload alike."""
        chunks = [chunk for chunk in self.design.chunks if chunk != TIME]
        return Candidate(self.design.collocated, int(chunks[-1]) if chunks else None)

    def _candidate(self, found: Calibrated, system: System) -> Candidate:
        chunk = TIME if system == self.design.adaptive else found.chunks[system.name]
        return self._with_chunk(system, chunk, found.slo)

    def _with_chunk(self, system: System, chunk: str, slo: Slo) -> Candidate:
        if chunk == TIME:
            return Candidate(system, slo=slo, refused_by_s=slo.ttft_s)
        return Candidate(system, int(chunk), refused_by_s=slo.ttft_s)


async def run_study(
    design: Design, study: Study, file: WindowFile, fleet: Fleet, budget_s: float, stop: asyncio.Event
) -> str:
    """Measures what the study lacks; returns why it ended early, empty if it did not.

    Raises what a start of the clusters raises, and WorkerLost where nothing could be measured.
    """
    conductor = Conductor(design, study, file, fleet, stop)
    try:
        async with fleet:
            await conductor.run(budget_s)
    except WorkerLost as error:
        if not study.windows:
            raise
        return error.message
    return conductor.stopped


def _listed(chunks: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {chunk}" for name, chunk in chunks.items())
