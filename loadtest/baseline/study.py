"""Measures every system under the same windows of requests, in turns, within a given time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from loadtest.baseline.calibrator import Calibrator
from loadtest.baseline.design import TIME, Design, in_order
from loadtest.baseline.fleet import Fleet
from loadtest.baseline.systems import Candidate
from loadtest.baseline.windows import Calibrated, Study, Window, WindowFile
from loadtest.baseline.workloads import WindowSize, seed_of, window_plan, with_other_prompts, write_trace
from loadtest.commands import measure_plan
from loadtest.run import Plan, RunResult
from loadtest.summary import invalid_reasons
from shared.errors import TandemError

_BETWEEN_S = 1.0
"""Between two windows, before any was measured: resuming a cluster, a warm-up request, the last answers."""
_STOP_S = 10.0
"""To stop the clusters and write the report."""


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
        candidates = {
            turn: self.design.candidate(system, found.slo, found.chunks) for turn, system in self.design.turns.items()
        }
        for candidate in dict.fromkeys(candidates.values()) if self.design.warm_up else ():
            await self._warm_up(found, candidate)
        while await self._next_rounds(found, candidates, deadline_s):
            pass
        await self.fleet.keep({self.design.calibrated})  # the next workload has other targets

    async def _calibrate(self, name: str) -> Calibrated | None:
        found = await Calibrator(self.design, self._measured).calibrate(name)
        if found is not None:
            self.file.add_workload(found)
            self.study.workloads[name] = found
        return found

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


async def run_study(
    design: Design, study: Study, file: WindowFile, fleet: Fleet, budget_s: float, stop: asyncio.Event
) -> str:
    """Measures what the study lacks; returns why it ended early, empty if it did not.

    Raises the error of a cluster or a window where nothing is measured yet.
    """
    conductor = Conductor(design, study, file, fleet, stop)
    try:
        async with fleet:
            await conductor.run(budget_s)
    except TandemError as error:
        if not study.windows:
            raise
        return error.message
    return conductor.stopped


def _listed(chunks: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {chunk}" for name, chunk in chunks.items())
