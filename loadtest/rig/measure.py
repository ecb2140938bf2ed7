"""Timing, turns, and what becomes of the values: medians, ratios within a round, percentiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def turns(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Each round's number with each item once, in an order that rotates: two items come as A B, B A, A B.

    A shared machine drifts by more than the systems differ, so systems are compared within a round.
    """
    for number in range(rounds):
        first = number % len(items)
        yield from ((number, item) for item in (*items[first:], *items[:first]))


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Median over rounds of one value over the other of the same round."""
    return median(a / b for a, b in zip(of, to, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated linearly between neighbours; there must be a value."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def times_s(action: Callable[[], object], repeats: int, warmup: int = 1) -> list[float]:
    """Seconds of each of the repeats; the warm-up runs come before them."""
    times = []
    for _ in range(warmup + repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times[warmup:]


def median_s(action: Callable[[], object], repeats: int, warmup: int = 1) -> float:
    """Median seconds of several runs."""
    return median(times_s(action, repeats, warmup))
