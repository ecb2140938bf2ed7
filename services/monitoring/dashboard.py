"""The Grafana dashboard: its panels by topic, and Grafana's JSON for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from services.monitoring.catalog import metric
from services.monitoring.expressions import Expression, observed, quantile, rate, value

SCOPE = 'namespace="$namespace"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
TTFT, TPOT = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `lines`: legend to query. The description is the help of the metrics that it reads."""

    title: str
    unit: str
    lines: Mapping[str, Expression]

    @property
    def description(self) -> str:
        """The definitions of all that it shows."""
        names = sorted({_family(sample) for line in self.lines.values() for sample, _ in line.uses})
        return "\n\n".join(f"{name}: {metric(name).help}" for name in names)


def _family(sample: str) -> str:
    return sample.removesuffix("_bucket") if sample.endswith("_bucket") else sample.removesuffix("_count")


def _quantiles(name: str) -> Mapping[str, Expression]:
    return {f"p{share * 100:g}": quantile(share, name) for share in (0.5, 0.95, 0.99)}


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel("Requests by outcome", "reqps", {"{{outcome}}": rate("tandem_requests_total", "outcome")}),
        Panel("Time to first token", "s", _quantiles(TTFT)),
        Panel("Time per output token", "s", _quantiles(TPOT)),
        Panel(
            "Where the time to the first token goes",
            "s",
            {
                "{{part}}": Expression(
                    f"{rate('tandem_ttft_part_seconds_total', 'part').text} / on () group_left {observed(TTFT).text}",
                    rate("tandem_ttft_part_seconds_total", "part").uses | observed(TTFT).uses,
                )
            },
        ),
        Panel("Time in the queue", "s", _quantiles("tandem_queue_seconds")),
        Panel(
            "Waiting and running",
            "short",
            {
                "waiting": value("tandem_router_waiting_requests", "sum"),
                "running": value("tandem_router_running_requests", "sum"),
            },
        ),
        Panel(
            "Refused, placed again, moved",
            "reqps",
            {
                "refused {{when}}: {{cause}}": rate("tandem_refusals_total", "when", "cause"),
                "again: {{cause}}": rate("tandem_retries_total", "cause"),
                "went on elsewhere, {{phase}}: {{cause}}": rate("tandem_migrations_total", "phase", "cause"),
                "answer to move ({{cause}}): {{outcome}}": rate("tandem_moves_total", "cause", "outcome"),
            },
        ),
        Panel("Calls by status", "reqps", {"{{status}}": rate("tandem_http_requests_total", "status")}),
        Panel(
            "Requests of tenants",
            "reqps",
            {"{{tenant}}": rate("tandem_tenant_requests_total", "tenant")},
        ),
    ),
    "Tokens": (
        Panel("Tokens of finished requests", "short", {"{{kind}}": rate("tandem_tokens_total", "kind")}),
        Panel(
            "Prompt tokens by place of their KV", "short", {"{{place}}": rate("tandem_prefix_tokens_total", "place")}
        ),
        Panel(
            "Prompt tokens not computed",
            "percentunit",
            {"share": rate("tandem_prefix_hit_tokens_total").over(rate("tandem_prompt_tokens_total"))},
        ),
        Panel("Output tokens of the engines", "short", {"{{pod}}": rate("tandem_engine_output_tokens_total", "pod")}),
        Panel("Prompt tokens computed", "short", {"{{pod}}": rate("tandem_engine_prefill_tokens_total", "pod")}),
        Panel(
            "Choices of experts by rank",
            "short",
            {"{{pod}} {{rank}}": rate("tandem_engine_expert_tokens_total", "pod", "rank")},
        ),
        Panel("Prefix look-ups", "s", _quantiles("tandem_index_lookup_seconds")),
    ),
    "Engines": (
        Panel("Median step by kind", "s", {"{{kind}}": quantile(0.5, "tandem_engine_step_duration_seconds", "kind")}),
        Panel("Time between tokens", "s", _quantiles("tandem_engine_inter_token_seconds")),
        Panel(
            "Right guesses by method",
            "percentunit",
            {
                "{{method}}": rate("tandem_engine_accepted_tokens_total", "method").over(
                    rate("tandem_engine_guessed_tokens_total", "method")
                )
            },
        ),
        Panel("Share of time in steps", "percentunit", {"{{pod}}": rate("tandem_engine_step_seconds_total", "pod")}),
        Panel("Running sequences", "short", {"{{pod}}": value("tandem_engine_running_sequences", "sum", "pod")}),
        Panel("Queued prompt tokens", "short", {"{{pod}}": value("tandem_engine_queued_tokens", "sum", "pod")}),
        Panel("KV blocks by state", "short", {"{{state}}": value("tandem_kv_blocks", "sum", "state")}),
        Panel(
            "Free share of the KV pools",
            "percentunit",
            {
                "{{pod}}": value("tandem_kv_free_blocks", "sum", "pod").over(
                    value("tandem_kv_pool_blocks", "sum", "pod")
                )
            },
        ),
        Panel("Preemptions", "short", {"{{pod}}": rate("tandem_engine_preemptions_total", "pod")}),
        Panel("Draining workers", "short", {"draining": value("tandem_worker_draining", "sum")}),
    ),
    "Transfer and store": (
        Panel("KV bytes sent", "Bps", {"{{pod}}": rate("tandem_transfer_sent_bytes_total", "pod")}),
        Panel(
            "Exposed share of hand-offs",
            "percentunit",
            {
                "{{pod}}": rate("tandem_shipment_exposed_seconds_total", "pod").over(
                    rate("tandem_shipment_seconds_total", "pod")
                )
            },
        ),
        Panel("What requests waited for hand-offs", "s", _quantiles("tandem_handoff_exposed_seconds")),
        Panel("UCX endpoints", "short", {"{{pod}}": value("tandem_transfer_endpoints", "sum", "pod")}),
        Panel("Placements", "reqps", {"{{route}}": rate("tandem_placements_total", "route")}),
        Panel(
            "Elastic pool: decoding workers, headroom",
            "short",
            {
                "decode {{pod}}": value("tandem_router_decode_preferred_workers", "sum", "pod"),
                "headroom {{pod}}": value("tandem_router_split_headroom", "sum", "pod"),
            },
        ),
        Panel("Round trips to Redis", "s", _quantiles("tandem_index_redis_seconds")),
        Panel("Store: used", "bytes", {"{{pod}} {{tier}}": value("tandem_store_used_bytes", "sum", "pod", "tier")}),
        Panel(
            "Store: hits",
            "percentunit",
            {
                "{{tier}}": Expression(
                    f"{rate('tandem_store_hits_total', 'tier').text} / ({rate('tandem_store_hits_total', 'tier').text}"
                    f" + {rate('tandem_store_misses_total', 'tier').text})",
                    rate("tandem_store_hits_total", "tier").uses | rate("tandem_store_misses_total", "tier").uses,
                )
            },
        ),
        Panel("Index available", "short", {"available": value("tandem_index_available", "min")}),
    ),
}


def dashboard() -> str:
    """Grafana's JSON."""
    panels: list[dict[str, object]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": _place(0, y, 24, 1), "panels": []}
        )
        y += 1
        for i, panel in enumerate(row):
            place = _place(i % _COLUMNS * _WIDTH, y + i // _COLUMNS * _HEIGHT, _WIDTH, _HEIGHT)
            panels.append(_panel(len(panels) + 1, panel, place))
        y += -(-len(row) // _COLUMNS) * _HEIGHT
    namespace = {
        "name": "namespace",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(tandem_requests_total, namespace)",
        "refresh": 1,
    }
    whole = {
        "uid": "tandem",
        "title": "Tandem",
        "tags": ["tandem"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, namespace]},
        "panels": panels,
    }
    return json.dumps(whole, indent=2) + "\n"


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, object]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": line.scoped(SCOPE), "legendFormat": legend}
        for i, (legend, line) in enumerate(panel.lines.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}
