"""The router's figures that are read when the page is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.views.metric_definitions import (
    GRPC_CALLS,
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


OBSERVED: tuple[Observed[RouterSources], ...] = (
    Observed(WAITING, lambda router: router.dispatcher.num_waiting),
    Observed(RUNNING, lambda router: router.num_running),
    Observed(WORKERS, _workers),
    Observed(LOOKUPS, lambda router: router.lookup.round_trips_s),
    Observed(LOOKUP_ERRORS, lambda router: router.lookup.num_errors),
)


METRICS: tuple[Metric, ...] = (*RECORDED, *(item.metric for item in OBSERVED), HTTP_REQUESTS, GRPC_CALLS)
"""All metrics of a router under our names."""
