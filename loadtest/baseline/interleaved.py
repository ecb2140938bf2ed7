"""Several systems under one workload, their measurements interleaved.

A shared machine drifts within minutes by more than the systems differ. So the systems are not measured one after the
other: all are measured at one rate each, then all at their next rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.baseline.systems import System
from loadtest.rate_search import Point, highest_at, next_rate
from loadtest.sweep import RunPoint, Sweep, measure_rate


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system with a chunk budget, and its measurements under one workload."""

    system: System
    chunk_len: int
    folder: Path
    sweep: Sweep
    run_point: RunPoint

    @property
    def best(self) -> Point | None:
        """Its maximum goodput; None if no rate met the targets."""
        return highest_at(self.sweep.points, self.sweep.space.attainment)

    @property
    def goodput(self) -> float:
        """Requests per second; 0 if no rate met the targets."""
        return self.best.goodput if self.best is not None else 0.0


OnPoint = Callable[[Candidate, Point], None]


class InterleavedSearch:
    """Searches for the limits of several candidates within a given time."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        on_point: OnPoint,
        point_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`point_s` is the least time of a point in seconds; plans use the longest one measured."""
        self._candidates = candidates
        self._on_point = on_point
        self._longest_s = point_s
        self._clock = clock

    async def search(self, deadline_s: float, points_after: int = 0) -> None:
        """Measures one rate for each candidate in any case, then further ones while these and `points_after` more fit
        before `deadline_s`."""
        moved = True
        while moved:
            moved = False
            for candidate in self._candidates:
                rate = next_rate(candidate.sweep.space, candidate.sweep.points)
                fits = self._clock() + self._longest_s * (1 + points_after) <= deadline_s
                if rate is not None and (fits or not candidate.sweep.points):
                    moved |= await self._measure(candidate, rate)

    async def at_rate(self, rate: float | None) -> None:
        """Measures the candidates that were not measured at `rate` yet."""
        for candidate in self._candidates:
            if rate is not None and rate not in {point.rate for point in candidate.sweep.points}:
                await self._measure(candidate, rate)

    async def _measure(self, candidate: Candidate, rate: float) -> bool:
        if candidate.sweep.stopped:
            return False
        started_s = self._clock()
        point = await measure_rate(candidate.sweep, rate, candidate.run_point)
        self._longest_s = max(self._longest_s, self._clock() - started_s)
        if point is not None:
            self._on_point(candidate, point)
        return point is not None


def rate_for_all(candidates: Sequence[Candidate]) -> float | None:
    """The highest rate known to be within every candidate's limit; None if a candidate met the targets at no rate."""
    best = [candidate.best for candidate in candidates]
    rates = [point.rate for point in best if point is not None]
    return min(rates) if rates and len(rates) == len(best) else None


def best_of_each_system(candidates: Sequence[Candidate]) -> list[Candidate]:
    """One candidate for each system, with its best chunk budget; the first one tried if they are equal."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        held = best.get(candidate.system.name)
        if held is None or candidate.goodput > held.goodput:
            best[candidate.system.name] = candidate
    return list(best.values())
