"""Counts of a histogram's buckets: what a hot path adds to, and what a page is made of."""

from __future__ import annotations

from bisect import bisect_left


class BucketCounts:
    """How many values lie up to each bound, and their sum. One thread adds, any may read; an addition costs well below
    a microsecond and allocates nothing that stays."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: upper ones, inclusive, ascending; above the last lies one more bucket."""
        self.bounds = bounds
        self.total = 0.0
        """Sum of the values."""
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Counts `value`, `times` ≥ 0 times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[int]:
        """Values up to each bound, and last all of them."""
        sums, so_far = [], 0
        for count in self._counts.copy():
            so_far += count
            sums.append(so_far)
        return sums
