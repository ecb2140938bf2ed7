"""One Prometheus page of several registries that hold the same metrics under different labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class _Joined(Collector):
    """Each metric once, with the samples of all registries; of equal ones, such as the process's, the first."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        for registry in self._registries:
            for metric in registry.collect():
                whole = joined.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    series = (sample.name, frozenset(sample.labels.items()))
                    if series not in seen:
                        seen.add(series)
                        whole.samples.append(sample)
        yield from joined.values()


def joined_page(registries: Sequence[CollectorRegistry]) -> bytes:
    """The Prometheus text format. What distinguishes the registries' samples has to be in their labels."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Joined(registries))
    return generate_latest(registry)
