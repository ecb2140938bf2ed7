"""A process's metrics: defined as data, kept as OpenTelemetry instruments, read as a Prometheus page.

A service lists its metrics in its own `metrics.py`. A value is either read, when the page is made, from an object that
counts anyway (`Observed`), or recorded when something happens (`ObservableCounter`, a histogram).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Histogram, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest

from shared.telemetry.loop_lag import LoopLag
from shared.telemetry.observable_counter import ObservableCounter

S = TypeVar("S")


class Kind(Enum):
    """Prometheus' TYPE."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as Prometheus knows it; the unit is the end of its name (before `_total`)."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending."""
    unit: str = ""
    """OpenTelemetry's unit, for names of its semantic conventions; the exporter appends it to the name."""


@dataclass(frozen=True, slots=True)
class Observed(Generic[S]):
    """A metric that is read from a source `S` when the page is made.

    `read` returns the value, or one value for each value of the metric's only label. It is called on the thread that
    serves the page and must not block.
    """

    metric: Metric
    read: Callable[[S], float | Mapping[str, float]]


def counter(name: str, help_text: str, *labels: str) -> Metric:
    """A sum since start; the name ends in `_total`."""
    return Metric(Kind.COUNTER, name, help_text, labels)


def gauge(name: str, help_text: str, *labels: str) -> Metric:
    """A value that goes up and down."""
    return Metric(Kind.GAUGE, name, help_text, labels)


LOOP_LAG: Observed[LoopLag] = Observed(
    gauge(
        "tandem_event_loop_lag_seconds", "Longest delay of the event loop lately, and longest computing in it.", "by"
    ),
    lambda lag: lag.largest_s(),
)


class Metrics:
    """All metrics of one process, in their own registry, with the Prometheus client's metrics of process and Python.

    `close()` ends the collection; idempotent.
    """

    def __init__(self, service: str, instance: str = "", common: Mapping[str, str] | None = None) -> None:
        """`service` and `instance` are the resource's `service.name` and `service.instance.id` (on the page:
        `target_info`), `common` the labels that every sample has."""
        attributes = {"service.name": service} | ({"service.instance.id": instance} if instance else {})
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        reader = PrometheusMetricReader(scope_info_enabled=False, registry=self.registry)
        self._provider = MeterProvider([reader], Resource.create(attributes))
        self._meter = self._provider.get_meter("tandem")
        self._common = dict(common or {})
        self._loop_lag = LoopLag()
        self._closed = False

    def counter(self, metric: Metric) -> ObservableCounter:
        """A counter to add to."""
        assert metric.kind is Kind.COUNTER
        return ObservableCounter(self._meter, metric.name, metric.help, metric.labels, self._common)

    def histogram(self, metric: Metric) -> Histogram:
        """A histogram to record in; the caller gives `common` with each value."""
        assert metric.kind is Kind.HISTOGRAM
        return self._meter.create_histogram(
            metric.name, metric.unit, metric.help, explicit_bucket_boundaries_advisory=metric.buckets
        )

    def observe(self, metrics: Iterable[Observed[S]], source: S) -> None:
        """Registers metrics that are read from `source` whenever the page is made."""
        for item in metrics:
            self._observe(item, source)

    def watch_loop(self) -> None:
        """Shows from now on how late the running event loop is; ends with `close`."""
        self._loop_lag.start()
        self.observe((LOOP_LAG,), self._loop_lag)

    def page(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def close(self) -> None:
        """Ends the collection."""
        if not self._closed:
            self._closed = True
            self._loop_lag.close()
            self._provider.shutdown()

    def _observe(self, item: Observed[S], source: S) -> None:
        metric = item.metric

        def read(_: CallbackOptions) -> Iterable[Observation]:
            value = item.read(source)
            if isinstance(value, Mapping):
                (label,) = metric.labels
                return [Observation(part, {**self._common, label: name}) for name, part in value.items()]
            return [Observation(value, self._common)]

        if metric.kind is Kind.COUNTER:
            self._meter.create_observable_counter(metric.name, [read], metric.unit, metric.help)
        else:
            assert metric.kind is Kind.GAUGE
            self._meter.create_observable_gauge(metric.name, [read], metric.unit, metric.help)
