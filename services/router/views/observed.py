"""The router's figures that are read when the page is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.placement.split import SplitController
from services.router.views.metric_definitions import (
    DECODERS,
    FLIPS,
    GRPC_CALLS,
    HEADROOM,
    HTTP_REQUESTS,
    LOOKUP_ERRORS,
    LOOKUPS,
    RECORDED,
    RUNNING,
    WAITING,
    WORKERS,
)
from services.router.views.metrics import RouterMetrics
from services.router.workers.fleet import Fleet
from shared.telemetry.instruments import LabelValues
from shared.telemetry.metrics import Metric, Observed


@dataclass(frozen=True, slots=True)
class RouterSources:
    """Where one model's figures are."""

    dispatcher: Dispatcher
    fleet: Fleet
    lookup: PrefixLookup
    counts: RouterMetrics
    split: SplitController | None = None
    """In mode auto."""

    @property
    def num_running(self) -> int:
        """Requests that workers have."""
        return self.dispatcher.num_active - self.dispatcher.num_waiting


def _workers(sources: RouterSources) -> Mapping[LabelValues, float]:
    found: dict[LabelValues, float] = {}
    for link in sources.fleet.links:
        for role in link.roles:
            key = (str(role), "yes" if link.connected else "no")
            found[key] = found.get(key, 0) + 1
    return found


def _of_split(read: Callable[[SplitController], float]) -> Callable[[RouterSources], Mapping[LabelValues, float]]:
    """The figure where there is one, else no series."""

    def values(sources: RouterSources) -> Mapping[LabelValues, float]:
        value = read(sources.split) if sources.split is not None else math.inf
        return {(): value} if math.isfinite(value) else {}

    return values


OBSERVED: tuple[Observed[RouterSources], ...] = (
    Observed(WAITING, lambda router: router.dispatcher.num_waiting),
    Observed(RUNNING, lambda router: router.num_running),
    Observed(WORKERS, _workers),
    Observed(DECODERS, _of_split(lambda split: len(split.split.decodes))),
    Observed(HEADROOM, _of_split(lambda split: split.split.headroom)),
    Observed(FLIPS, _of_split(lambda split: split.num_flips)),
    Observed(LOOKUPS, lambda router: router.lookup.round_trips_s),
    Observed(LOOKUP_ERRORS, lambda router: router.lookup.num_errors),
)


METRICS: tuple[Metric, ...] = (*RECORDED, *(item.metric for item in OBSERVED), HTTP_REQUESTS, GRPC_CALLS)
"""All metrics of a router under our names."""
