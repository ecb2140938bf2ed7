"""Cheap counters for events of every request: each costs one addition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Meter, Observation


class ObservableCounter:
    """An OpenTelemetry counter that is read when metrics are collected, with one sum for each combination of labels.

    The SDK's own counter hashes and validates its attributes with every `add`, which takes tens of microseconds; a
    request makes a dozen such calls. One thread adds; any thread may collect.
    """

    def __init__(
        self, meter: Meter, name: str, description: str, labels: tuple[str, ...], common: Mapping[str, str]
    ) -> None:
        """`labels` are the attributes whose values are passed to each `add`, `common` the constant ones."""
        self._labels = labels
        self._common = dict(common)
        self._sums: dict[tuple[str, ...], int] = {}
        meter.create_observable_counter(name, callbacks=[self._observe], description=description)

    def add(self, amount: int, *values: str) -> None:
        """Adds `amount` ≥ 0 under these values of the labels, in their order."""
        self._sums[values] = self._sums.get(values, 0) + amount

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        for values, total in self._sums.copy().items():  # a copy is atomic: another thread may add a key
            yield Observation(total, {**self._common, **dict(zip(self._labels, values, strict=True))})
