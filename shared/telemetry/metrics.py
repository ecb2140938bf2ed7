"""A process's metrics: defined as data, read when its Prometheus page is made.

A service lists its metrics in its own `metrics.py`. A value is either read, when the page is made, from an object that
counts anyway (`Observed`), or recorded when something happens (`Counter`, `Histogram`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from shared.telemetry.buckets import BucketCounts
from shared.telemetry.instruments import Counter, Histogram, LabelValues
from shared.telemetry.loop_lag import LoopLag

S = TypeVar("S")

Value = float | BucketCounts
"""Value of one series; bucket counts for a histogram."""
Values = Value | Mapping[str, Value] | Mapping[str, float] | Mapping[LabelValues, Value] | Mapping[LabelValues, float]
"""Values of a metric: one without labels, by its only label, or by all of its labels."""


class Kind(Enum):
    """Prometheus' TYPE."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_UNITS = {"s": "_seconds", "": ""}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. In names of our own the unit is the end (before `_total`)."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending."""
    unit: str = ""
    """`s` for names of OpenTelemetry's semantic conventions, which do not have it; Prometheus' name does."""

    @property
    def exposed_name(self) -> str:
        """Its name on the page; a histogram's samples have `_bucket`, `_sum` and `_count` behind it."""
        return self.name.replace(".", "_") + _UNITS[self.unit]


@dataclass(frozen=True, slots=True)
class Observed(Generic[S]):
    """A metric that is read from a source `S` when the page is made.

    `read` is called on the thread that serves the page and must not block.
    """

    metric: Metric
    read: Callable[[S], Values]


def counter(name: str, help_text: str, *labels: str) -> Metric:
    """A sum since start; the name ends in `_total`."""
    return Metric(Kind.COUNTER, name, help_text, labels)


def gauge(name: str, help_text: str, *labels: str) -> Metric:
    """A value that goes up and down."""
    return Metric(Kind.GAUGE, name, help_text, labels)


def histogram(name: str, help_text: str, buckets: tuple[float, ...], *labels: str, unit: str = "") -> Metric:
    """Counts of values by size."""
    return Metric(Kind.HISTOGRAM, name, help_text, labels, buckets, unit)


LOOP_LAG: Observed[LoopLag] = Observed(
    gauge(
        "tandem_event_loop_lag_seconds", "Longest delay of the event loop lately, and longest computing in it.", "by"
    ),
    lambda lag: lag.largest_s(),
)


@dataclass(frozen=True, slots=True, eq=False)
class _Source(Collector):
    """One metric of a registry."""

    metric: Metric
    common: Mapping[str, str]
    read: Callable[[], Values]

    def describe(self) -> Iterable[Family]:
        """What the registry checks for doubles, without reading."""
        yield self._family()

    def collect(self) -> Iterator[Family]:
        """The metric with all its series."""
        family, values = self._family(), self.read()
        for series, value in values.items() if isinstance(values, Mapping) else (((), values),):
            named = (series,) if isinstance(series, str) else series
            labels = {**self.common, **dict(zip(self.metric.labels, named, strict=True))}
            if isinstance(value, BucketCounts):
                _add_histogram(family, labels, value)
            else:
                family.add_sample(self.metric.exposed_name, labels, value)
        yield family

    def _family(self) -> Family:
        metric = self.metric
        name = metric.exposed_name
        return Family(
            name.removesuffix("_total") if metric.kind is Kind.COUNTER else name, metric.help, metric.kind.value
        )


def _add_histogram(family: Family, labels: dict[str, str], counts: BucketCounts) -> None:
    cumulative = counts.cumulative()
    for bound, below in zip((*map(str, counts.bounds), "+Inf"), cumulative, strict=True):
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, below)
    family.add_sample(f"{family.name}_count", labels, cumulative[-1])
    family.add_sample(f"{family.name}_sum", labels, counts.total)


class Metrics:
    """All metrics of one process, in their own registry, with the Prometheus client's metrics of process and Python.

    `close()` ends the collection; idempotent.
    """

    def __init__(self, service: str, instance: str = "", common: Mapping[str, str] | None = None) -> None:
        """`service` and `instance` are OpenTelemetry's `service.name` and `service.instance.id` (on the page:
        `target_info`), `common` the labels that every sample has, by their Prometheus names."""
        self.registry = CollectorRegistry(auto_describe=True)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._common = dict(common or {})
        self._loop_lag = LoopLag()
        self._closed = False
        about = {"service_name": service, "service_version": importlib.metadata.version("tandem-llm")}
        about |= {"service_instance_id": instance} if instance else {}
        target = gauge("target_info", "What this process is.", *about)
        self.registry.register(_Source(target, {}, lambda: {tuple(about.values()): 1.0}))

    def counter(self, metric: Metric) -> Counter:
        """A counter to add to."""
        assert metric.kind is Kind.COUNTER
        made = Counter()
        self.registry.register(_Source(metric, self._common, made.read))
        return made

    def histogram(self, metric: Metric) -> Histogram:
        """A histogram to record in."""
        assert metric.kind is Kind.HISTOGRAM
        made = Histogram(metric.buckets)
        self.registry.register(_Source(metric, self._common, made.read))
        return made

    def observe(self, metrics: Iterable[Observed[S]], source: S, common: Mapping[str, str] | None = None) -> None:
        """Registers metrics that are read from `source` whenever the page is made, with labels of their own in place of
        the process's where `common` names some."""
        for item in metrics:
            self._observe(item, source, self._common if common is None else common)

    def _observe(self, item: Observed[S], source: S, common: Mapping[str, str]) -> None:
        self.registry.register(_Source(item.metric, common, lambda: item.read(source)))

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
