"""Several systems under one workload, in turns.

A shared machine drifts within minutes by more than the systems differ. So nobody is measured from beginning to end
before the next: each gets a rate, then each gets its next one.
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
class Entrant:
    """A system with a chunk budget, and what was measured of it under one workload."""

    system: System
    chunk_len: int
    folder: Path
    sweep: Sweep
    run_point: RunPoint

    @property
    def best(self) -> Point | None:
        """Its maximum goodput; None where no rate met the targets."""
        return highest_at(self.sweep.points, self.sweep.space.attainment)

    @property
    def goodput(self) -> float:
        """Requests per second; 0 where no rate met the targets."""
        return self.best.goodput if self.best is not None else 0.0


OnPoint = Callable[[Entrant, Point], None]


class Contest:
    """Searches for the limits of some entrants within a time."""

    def __init__(
        self,
        entrants: Sequence[Entrant],
        on_point: OnPoint,
        point_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`point_s` is what a point takes at least, in seconds; the longest of those measured is reckoned with."""
        self._entrants = entrants
        self._on_point = on_point
        self._longest_s = point_s
        self._clock = clock

    async def search(self, deadline_s: float, points_after: int = 0) -> None:
        """A rate each, whatever the time; then further ones, as long as they and `points_after` more fit before
        `deadline_s`."""
        moved = True
        while moved:
            moved = False
            for entrant in self._entrants:
                rate = next_rate(entrant.sweep.space, entrant.sweep.points)
                fits = self._clock() + self._longest_s * (1 + points_after) <= deadline_s
                if rate is not None and (fits or not entrant.sweep.points):
                    moved |= await self._measure(entrant, rate)

    async def at_rate(self, rate: float | None) -> None:
        """Measures whoever was not measured at `rate` yet."""
        for entrant in self._entrants:
            if rate is not None and rate not in {point.rate for point in entrant.sweep.points}:
                await self._measure(entrant, rate)

    async def _measure(self, entrant: Entrant, rate: float) -> bool:
        if entrant.sweep.stopped:
            return False
        started_s = self._clock()
        point = await measure_rate(entrant.sweep, rate, entrant.run_point)
        self._longest_s = max(self._longest_s, self._clock() - started_s)
        if point is not None:
            self._on_point(entrant, point)
        return point is not None


def rate_for_all(entrants: Sequence[Entrant]) -> float | None:
    """The highest rate known to be within every entrant's limit; None where some entrant met the targets at none."""
    best = [entrant.best for entrant in entrants]
    rates = [point.rate for point in best if point is not None]
    return min(rates) if rates and len(rates) == len(best) else None


def best_of_each_system(entrants: Sequence[Entrant]) -> list[Entrant]:
    """One entrant a system, with its best chunk budget; the first one tried, where they are equal."""
    best: dict[str, Entrant] = {}
    for entrant in entrants:
        held = best.get(entrant.system.name)
        if held is None or entrant.goodput > held.goodput:
            best[entrant.system.name] = entrant
    return list(best.values())
