"""docs/metrics.md: every metric with type, unit, labels and meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from services.monitoring.catalog import COMMON, SERVICES, VLLM
from services.monitoring.rules import ALERTS, RECORDINGS
from shared.telemetry.metrics import Kind, Metric

INTRODUCTION = """\
# Metrics

Made by `python -m services.monitoring` from the code; `make lint` fails where it is stale. Do not edit it by hand.

Every service has a Prometheus page: the router at `/metrics` of its HTTP port, the others at their setting `metrics`
(`tandem status` and the log of `tandem serve` name the addresses). `target_info` says which service and process it is;
the Prometheus client's own `process_*` and `python_*` metrics are there too. Durations are seconds, sizes bytes.

The dashboard ([dashboard.json](../helm/tandem/files/dashboard.json)) and the rules
([rules.yaml](../helm/tandem/files/rules.yaml)) are made from the same definitions; the chart installs them
(`metrics.dashboard`, `metrics.rules`). They ask for the labels `namespace` and `pod`, which Prometheus' discovery gives
in Kubernetes. Elsewhere the scrape configuration does:

```yaml
scrape_configs:
  - job_name: tandem
    static_configs:
      - {targets: ["127.0.0.1:8000"], labels: {namespace: local, pod: router-0}}
      - {targets: ["127.0.0.1:9101"], labels: {namespace: local, pod: prefill-0}}
```

## TTFT, TPOT, ITL

The same in metrics, the access log, `/status`, the page, `tandem explain`, traces and the answer's `tandem` member:

- **TTFT**: from the arrival of a call's head at the router to its first token there, which is passed on to the client
  at once. The network between client and router is not in it.
- **TPOT**: (end - first token) / (output tokens - 1), for each request of two tokens or more. The end is when the
  router had passed the last of the answer on to the client's connection, so that a client that reads slowly counts;
  of an answer that is not streamed, when its last token had come. The tokens are those that the client was given.
- **ITL**: the gap between two consecutive tokens, by the engine's steps: `tandem_engine_inter_token_seconds`.
"""

_UNITS = {"seconds": "s", "bytes": "bytes", "tokens": "tokens", "blocks": "blocks", "requests": "requests"}


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for service, metrics in SERVICES.items():
        lines += [f"## {service[0].upper()}{service[1:]}", ""]
        if service in COMMON:
            lines += [f"Samples also have the label `{COMMON[service]}`, but for those of the whole process.", ""]
        lines += [*_table(metrics), ""]
    lines += [
        "## vLLM's names",
        "",
        "With the setting `vllm_metrics` of router and workers, so that dashboards, autoscalers and gateways that know"
        " vLLM find what they ask for. Every sample has `model_name` and `engine`. A router speaks for the cluster, a"
        " worker for itself: choose one of them where both are scraped.",
        "",
    ]
    for service, metrics in VLLM.items():
        lines += [f"### {service[0].upper()}{service[1:]}", "", *_table(metrics), ""]
    lines += ["## Rules", "", "| recorded | query |", "| --- | --- |"]
    lines += [f"| `{item.name}` | `{item.query.scoped()}` |" for item in RECORDINGS]
    lines += ["", "| alert | lasting | when | what helps |", "| --- | --- | --- | --- |"]
    for alert in ALERTS:
        summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", alert.summary)
        lines.append(f"| `{alert.name}` ({alert.severity}) | {alert.lasting} | {summary} | {alert.look} |")
    return "\n".join(lines) + "\n"


def _table(metrics: Sequence[Metric]) -> Iterator[str]:
    yield "| metric | type | unit | labels | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for item in metrics:
        labels = ", ".join(f"`{label}`" for label in item.labels)
        yield f"| `{item.exposed_name}` | {item.kind.value} | {unit_of(item)} | {labels} | {item.help} |"


def unit_of(item: Metric) -> str:
    """The end of its name, or what a counter counts."""
    words = item.exposed_name.removesuffix("_total").split("_")
    known = next((_UNITS[word] for word in reversed(words) if word in _UNITS), "")
    if words[-1] in _UNITS:
        return _UNITS[words[-1]]
    return known if item.kind is Kind.GAUGE and known else "1"
