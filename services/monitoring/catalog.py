"""All metrics of all services."""

from __future__ import annotations

from collections.abc import Mapping

from services.kvstore.metrics import METRICS as KVSTORE
from services.kvstore.metrics import NODE_METRICS
from services.planner.metrics import METRICS as PLANNER
from services.router.views.observed import METRICS as ROUTER
from services.router.views.vllm_names import VLLM as ROUTER_VLLM
from services.worker.telemetry.metrics import METRICS as WORKER
from services.worker.telemetry.vllm_names import VLLM as WORKER_VLLM
from shared.telemetry.metrics import LOOP_LAG, Metric
from shared.telemetry.tracing.tracer import METRICS as TRACES

_TRACES = tuple(item.metric for item in TRACES)

SERVICES: Mapping[str, tuple[Metric, ...]] = {
    "router": (*ROUTER, *_TRACES, LOOP_LAG.metric),
    "worker": (*(item.metric for item in WORKER), *_TRACES, LOOP_LAG.metric),
    "KV store": (
        *(item.metric for item in KVSTORE),
        *(item.metric for item in NODE_METRICS),
        *_TRACES,
        LOOP_LAG.metric,
    ),
    "planner": tuple(item.metric for item in PLANNER),
}
"""Metrics by the service that has them. Both kinds of workers have the same."""

VLLM: Mapping[str, tuple[Metric, ...]] = {
    "router": tuple(item.metric for item in ROUTER_VLLM),
    "worker": tuple(item.metric for item in WORKER_VLLM),
}
"""Metrics under vLLM's names, of the setting `vllm_metrics`."""

COMMON = {"router": "gen_ai_response_model"}
"""The label that nearly all samples of a service have."""

TARGET_LABELS = ("namespace", "pod")
"""Labels of every series, set by Prometheus's discovery of targets; the dashboard and the rules need them."""


def metric(name: str) -> Metric:
    """The metric of an exposed name; raises KeyError."""
    return _BY_NAME[name]


_BY_NAME = {item.exposed_name: item for metrics in SERVICES.values() for item in metrics}
