"""What a service records in: sums and histograms by the values of their labels, cheap enough for every request.

A library's own instruments hash and check their attributes at every call, which takes tens of microseconds; a request
makes a dozen of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.telemetry.buckets import BucketCounts

LabelValues = tuple[str, ...]
"""Values of a metric's labels, in their order."""


class Counter:
    """A sum for each combination of label values. One thread adds; any thread may read."""

    def __init__(self) -> None:
        self._sums: dict[LabelValues, float] = {}

    def add(self, amount: float, *values: str) -> None:
        """Adds `amount` ≥ 0 under these values of the labels, in their order."""
        self._sums[values] = self._sums.get(values, 0) + amount

    def add_each(self, series: Iterable[LabelValues], amounts: Iterable[float]) -> None:
        """Adds an amount to each series, as many as there are series: cheaper than one call for each."""
        sums = self._sums
        for values, amount in zip(series, amounts, strict=True):
            sums[values] = sums.get(values, 0) + amount

    def read(self) -> Mapping[LabelValues, float]:
        """The sums by the values of their labels."""
        return self._sums.copy()  # a copy is atomic: another thread may add a key


class Histogram:
    """Bucket counts for each combination of label values. One thread records; any thread may read."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._series: dict[LabelValues, BucketCounts] = {}

    def record(self, value: float, *values: str) -> None:
        """Counts a value under these values of the labels, in their order."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = BucketCounts(self._bounds)
        series.add(value)

    def read(self) -> Mapping[LabelValues, BucketCounts]:
        """The counts of all series by the values of their labels."""
        return self._series.copy()

    def series(self, *values: str) -> BucketCounts:
        """The one under these values of the labels; empty where nothing was recorded."""
        return self._series.get(values) or BucketCounts(self._bounds)
