"""Counters that OpenTelemetry reads when it collects."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from shared.telemetry.observable_counter import ObservableCounter


def collected(reader: InMemoryMetricReader) -> dict[tuple[tuple[str, object], ...], float]:
    data = reader.get_metrics_data()
    if data is None:
        return {}
    points = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    return {tuple(sorted(point.attributes.items())): point.value for point in points}


def test_sums_are_kept_by_label_and_grow_from_one_collection_to_the_next() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    tally = ObservableCounter(provider.get_meter("m"), "things", "what happened", ("kind", "place"), {"model": "x"})
    tally.add(2, "a", "here")
    tally.add(0, "b", "here")
    here = (("kind", "a"), ("model", "x"), ("place", "here"))
    there = (("kind", "b"), ("model", "x"), ("place", "here"))
    assert collected(reader) == {here: 2, there: 0}
    tally.add(3, "a", "here")
    assert collected(reader) == {here: 5, there: 0}
    provider.shutdown()
