"""Finds the highest rate at which the targets are met: a search over rates, in plain numbers.

Goodput in DistServe's sense (Zhong et al., OSDI 2024) is the highest rate at which a given share of the offered
requests meets both targets. The search assumes that attainment falls with the rate: it doubles the rate until
attainment is below the wanted share, or halves it until it is not, then closes in. Every step is one run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigError

SIGNIFICANT_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Point:
    """The results at one rate."""

    rate: float  # requested, in requests per second
    offered_rate: float
    goodput: float
    attainment: float
    valid: bool = True
    """False: the generator could not keep up. Such a point guides the search but is never its result."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The range of rates to search, and the precision."""

    start_rate: float = 1.0
    min_rate: float = 0.05
    max_rate: float = 1000.0
    attainment: float = 0.9
    tolerance: float = 0.1
    """The result may be lower than the true limit by this share."""
    max_points: int = 12

    def __post_init__(self) -> None:
        if not 0 < self.min_rate <= self.start_rate <= self.max_rate < math.inf:
            raise ConfigError(
                f"rates must satisfy 0 < rate_min ≤ rate ≤ rate_max, got {self.min_rate:g}, {self.start_rate:g}, "
                f"{self.max_rate:g}",
                field="rate",
            )
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"attainment must be above 0 and at most 1, got {self.attainment:g}", field="attainment")
        if not 0.001 <= self.tolerance <= 1:
            raise ConfigError(f"tolerance must be between 0.001 and 1, got {self.tolerance:g}", field="tolerance")
        if self.max_points < 1:
            raise ConfigError(f"max_points must be at least 1, got {self.max_points}", field="max_points")


def next_rate(space: SearchSpace, points: Sequence[Point]) -> float | None:
    """The rate to measure next; None if the limit is known precisely enough or cannot be found."""
    if len(points) >= space.max_points:
        return None
    wanted = _wanted_rate(space, points)
    if wanted is None:
        return None
    rate = float(f"{wanted:.{SIGNIFICANT_DIGITS}g}")  # for display, by which a bound may be a rate that was measured
    return None if any(point.rate == rate for point in points) else rate


def _wanted_rate(space: SearchSpace, points: Sequence[Point]) -> float | None:
    if not points:
        return space.start_rate
    passed = [point.rate for point in points if point.attainment >= space.attainment]
    missed = [point.rate for point in points if point.attainment < space.attainment]
    if not missed:
        highest_point = max(points, key=lambda point: point.rate)
        if highest_point.rate >= space.max_rate or not highest_point.valid:
            return None  # the generator cannot keep up at higher rates either
        return min(2 * highest_point.rate, space.max_rate)
    lowest = min(missed)
    below = [rate for rate in passed if rate < lowest]
    if not below:
        return None if lowest <= space.min_rate else max(lowest / 2, space.min_rate)
    highest = max(below)
    # Geometric bisection of the bracket.
    return None if lowest / highest <= 1 + space.tolerance else math.sqrt(lowest * highest)


def highest_at(points: Sequence[Point], attainment: float) -> Point | None:
    """The highest validly measured rate at which the share was met, if no lower rate missed it; None = none."""
    best: Point | None = None
    for point in sorted(points, key=lambda point: point.rate):
        if point.attainment < attainment:
            break
        best = point if point.valid else best
    return best


def knee(points: Sequence[Point]) -> Point | None:
    """The rate beyond which goodput grows less: the point farthest above the line from the first to the last.

    That is Kneedle's definition (Satopää et al., 2011) on axes scaled to [0, 1]. None with fewer than three points, or
    if no point lies above that line: no knee was reached.
    """
    ordered = sorted((point for point in points if point.valid), key=lambda point: point.offered_rate)
    if len(ordered) < 3:
        return None
    first, last = ordered[0], ordered[-1]
    width = last.offered_rate - first.offered_rate
    height = max(point.goodput for point in ordered) - min(point.goodput for point in ordered)
    if width <= 0 or height <= 0:
        return None

    def above(point: Point) -> float:
        x = (point.offered_rate - first.offered_rate) / width
        return (point.goodput - first.goodput) / height - x * (last.goodput - first.goodput) / height

    best = max(ordered[1:-1], key=above)
    return best if above(best) > 0.02 else None
