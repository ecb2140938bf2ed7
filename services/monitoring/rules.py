"""Recording and alerting rules for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from services.monitoring.expressions import Expression, increase, quantile, rate, value
from shared.errors import TandemError, error_classes


def _is_fault(cls: type[TandemError]) -> bool:
    """Whether a service counts it as the cluster's fault. Classes of clients may be imported too, or may not."""
    return cls.__module__ == TandemError.__module__ and cls.http_status >= 500 and cls.code != "draining"


SERVER_FAULTS = "~" + "|".join(sorted({cls.code for cls in error_classes().values() if _is_fault(cls)}))
"""Outcomes that are the cluster's fault."""

TTFT, TPOT = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"
W = "5m"


@dataclass(frozen=True, slots=True)
class Recording:
    """A query that is kept under a name."""

    name: str
    query: Expression


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert. `look`: where to look, and what helps."""

    name: str
    query: Expression
    lasting: str
    severity: str
    summary: str
    look: str


RECORDINGS: Sequence[Recording] = (
    Recording("tandem:requests:rate5m", rate("tandem_requests_total", "namespace", "outcome", window=W)),
    Recording("tandem:ttft_seconds:p50_5m", quantile(0.5, TTFT, "namespace", window=W)),
    Recording("tandem:ttft_seconds:p95_5m", quantile(0.95, TTFT, "namespace", window=W)),
    Recording("tandem:tpot_seconds:p95_5m", quantile(0.95, TPOT, "namespace", window=W)),
    Recording("tandem:queue_seconds:p95_5m", quantile(0.95, "tandem_queue_seconds", "namespace", window=W)),
    Recording(
        "tandem:prefix_hit:ratio5m",
        rate("tandem_prefix_hit_tokens_total", "namespace", window=W).over(
            rate("tandem_prompt_tokens_total", "namespace", window=W)
        ),
    ),
    Recording(
        "tandem:handoff_exposed:ratio5m",
        rate("tandem_shipment_exposed_seconds_total", "namespace", window=W).over(
            rate("tandem_shipment_seconds_total", "namespace", window=W)
        ),
    ),
)

_ALL = rate("tandem_requests_total", "namespace", window=W)

ALERTS: Sequence[Alert] = (
    Alert(
        "TandemRequestsFail",
        rate("tandem_requests_total", "namespace", window=W, outcome=SERVER_FAULTS).over(_ALL).above(0.05),
        "5m",
        "critical",
        "More than 5 % of requests fail by a fault of the cluster.",
        "`tandem status`; tandem_requests_total by outcome; the routers' log, which has a line for each of them.",
    ),
    Alert(
        "TandemRefusesRequests",
        rate("tandem_requests_total", "namespace", window=W, outcome="overloaded").over(_ALL).above(0.05),
        "10m",
        "warning",
        "More than 5 % of requests are refused by admission.",
        "More load than the targets allow: more workers, or a later admission.ttft_target_s.",
    ),
    Alert(
        "TandemRetries",
        rate("tandem_retries_total", "namespace", window=W).over(_ALL).above(0.05),
        "5m",
        "warning",
        "More than 5 % of requests are placed again after a worker or a transfer failed.",
        "tandem_retries_total by cause; which workers `tandem status` calls not connected.",
    ),
    Alert(
        "TandemWorkerNotConnected",
        value("tandem_router_workers", "max", "namespace", "role", up="no").above(0),
        "2m",
        "warning",
        "A router is not connected to a {{ $labels.role }} worker.",
        "`tandem status` gives the reason.",
    ),
    Alert(
        "TandemIndexDown",
        value("tandem_index_available", "min", "namespace", "pod").below(1),
        "2m",
        "warning",
        "Redis does not answer {{ $labels.pod }}: prompts are placed without the index.",
        "Redis or Valkey and the way to it; requests succeed meanwhile, with fewer prefix hits.",
    ),
    Alert(
        "TandemKvPoolFull",
        value("tandem_kv_free_blocks", "sum", "namespace", "pod")
        .over(value("tandem_kv_pool_blocks", "sum", "namespace", "pod"))
        .below(0.05),
        "10m",
        "warning",
        "Less than 5 % of the KV pool of {{ $labels.pod }} is free.",
        "More decode workers or memory, or shorter answers; preemptions come next.",
    ),
    Alert(
        "TandemPreempts",
        rate("tandem_engine_preemptions_total", "namespace", "pod", window=W).above(0.1),
        "10m",
        "warning",
        "{{ $labels.pod }} takes blocks from running answers, which pause.",
        "As for TandemKvPoolFull.",
    ),
    Alert(
        "TandemTransfersFail",
        rate("tandem_transfer_failed_blocks_total", "namespace", "pod", window=W).above(0),
        "5m",
        "warning",
        "{{ $labels.pod }} cannot send KV blocks.",
        "The network between the workers, UCX_TLS; each failure costs a retry.",
    ),
    Alert(
        "TandemDamagedBlocks",
        increase("tandem_kv_bad_blocks_total", "namespace", "pod", window="15m").above(0),
        "0m",
        "warning",
        "KV blocks arrived damaged at {{ $labels.pod }}; they were dropped and computed.",
        "Memory, network cards and disks of the two sides.",
    ),
    Alert(
        "TandemStoreFails",
        value("tandem_store_failing", "max", "namespace", "pod", "tier").above(0),
        "5m",
        "warning",
        "The {{ $labels.tier }} tier of {{ $labels.pod }} fails.",
        "Its log; a disk that is full, read-only or broken. The other tiers keep working.",
    ),
    Alert(
        "TandemEventLoopLags",
        value("tandem_event_loop_lag_seconds", "max", "namespace", "pod", by="clock").above(0.5),
        "5m",
        "warning",
        "The event loop of {{ $labels.pod }} stands still for half a second at a time.",
        "Too little CPU, or neighbours that take it; every request there waits that long.",
    ),
)


def rules() -> str:
    """A rule file, which is also the `spec` of a PrometheusRule."""
    recorded = [{"record": item.name, "expr": item.query.scoped()} for item in RECORDINGS]
    groups = [
        {"name": "tandem.recording", "rules": recorded},
        {"name": "tandem.alerts", "rules": list(map(_alert, ALERTS))},
    ]
    head = "# Made by `python -m services.monitoring` from the metrics' definitions. Do not edit it by hand.\n"
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=120)


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.query.scoped(),
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.look},
    }
