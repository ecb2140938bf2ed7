"""The page of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.metrics import request_metrics
from loadtest.records import RequestRecord
from loadtest.report.page import (
    DEFINITIONS,
    Cell,
    Tile,
    banners,
    details,
    facts,
    figures,
    heading,
    page,
    section,
    table,
    tiles,
)
from loadtest.report.plots import (
    cdf_plot,
    failures_plot,
    slo_scale_plot,
    split_plot,
    timeline_plots,
    ttft_time_plot,
)
from loadtest.slo import Slo
from loadtest.tables import LATENCIES, STATISTICS, failures_text, number, run_facts, slo_text


def render_run(summary: Mapping[str, Any], records: Sequence[RequestRecord]) -> str:
    """Made from the contents of `summary.json` and `requests.jsonl` only."""
    slo = slo_of(summary)
    title = summary["label"] or summary["workload"]
    subtitle = (
        f"{summary['target']} · {summary['model_id']} · {summary['workload']} · {traffic_text(summary)} · "
        f"seed {summary['seed']} · {summary['date']}"
    )
    body = [
        heading(title, subtitle),
        banners(summary),
        tiles(_headline(summary)),
        figures(_plots(summary, records, slo)),
        section("Latency, ms", _latency_table(summary)),
        section("Server's TTFT split, ms", _split_table(summary)),
        section("What bound it", _causes_table(summary)),
        section("Failures", _failures_table(summary)),
        section("Run", facts(run_facts(summary))),
        details("Settings", facts(_settings(summary))),
        DEFINITIONS,
    ]
    return page(f"{title} - load test", "\n".join(part for part in body if part))


def slo_of(summary: Mapping[str, Any]) -> Slo | None:
    """The targets of a summary."""
    slo = summary["slo_ms"]
    if slo is None:
        return None
    return Slo(*(None if slo[name] is None else slo[name] / 1e3 for name in ("ttft", "tpot")))


def traffic_text(summary: Mapping[str, Any]) -> str:
    """A text on how requests were offered."""
    if summary["max_concurrency"] is not None:
        return f"closed loop of {summary['max_concurrency']}"
    traffic = summary["config"]["traffic"]
    rate = f"{number(summary['offered_rate'])} req/s"
    if traffic["ramp_to"] is not None:
        return f"ramp from {traffic['rate']:g} to {traffic['ramp_to']:g} req/s"
    if traffic["burstiness"] != 1.0:
        return f"{rate}, burstiness {traffic['burstiness']:g}"
    return rate


def _headline(summary: Mapping[str, Any]) -> list[Tile]:
    items = []
    if summary["goodput"] is not None:
        share = summary["attainment"]
        mood = "good" if share >= 0.9 else "bad"
        note = f"{share:.1%} of {number(summary['offered_rate'])} req/s offered"
        items.append(Tile("Goodput", number(summary["goodput"]), "req/s", note, mood))
    else:
        items.append(Tile("Requests", number(summary["request_throughput"]), "req/s", "no targets given"))
    slo = summary["slo_ms"] or {}
    for key, name in (("ttft", "TTFT"), ("tpot", "TPOT")):
        target = slo.get(key)
        limit = "" if target is None else f", target {target:g}"
        note = f"p99 {number(summary[f'p99_{key}_ms'])}{limit}"
        items.append(Tile(f"{name} p50", number(summary[f"p50_{key}_ms"]), "ms", note))
    items.append(
        Tile("Output", number(summary["output_throughput"]), "tokens/s", f"{number(summary['input_throughput'])} in/s")
    )
    failed = summary["failed"]
    items.append(Tile("Failed", str(failed), "", f"of {summary['offered']} offered", "bad" if failed else ""))
    return items


def _plots(summary: Mapping[str, Any], records: Sequence[RequestRecord], slo: Slo | None) -> list[tuple[str, str, str]]:
    found = [metrics for record in records if (metrics := request_metrics(record)) is not None]
    duration_s = summary["duration"]
    in_flight, tokens = timeline_plots(records, duration_s)
    return [
        (
            "TTFT",
            "Share of answers whose first token came within this time.",
            cdf_plot({"TTFT": [m.ttft_s for m in found]}, slo.ttft_s if slo else None, "TTFT"),
        ),
        (
            "TPOT",
            "Share of answers whose time per output token was at most this.",
            cdf_plot({"TPOT": [m.tpot_s for m in found if m.tpot_s is not None]}, slo.tpot_s if slo else None, "TPOT"),
        ),
        ("In flight", "Requests sent and not yet answered.", in_flight),
        ("Tokens", "Output tokens that arrived per second, over all requests.", tokens),
        (
            "TTFT split",
            "The parts of the TTFT that the server reports; other: network, client, unaccounted.",
            split_plot(records),
        ),
        (
            "Stricter and looser targets",
            "Attainment if both targets were multiplied by this factor.",
            slo_scale_plot(records, slo) if slo else "",
        ),
        ("TTFT over time", "One dot a request, at the time it was sent.", ttft_time_plot(records, slo, duration_s)),
        ("Failures", "When requests failed, and why.", failures_plot(records, duration_s)),
    ]


def _latency_table(summary: Mapping[str, Any]) -> str:
    rows = [[title, *(number(summary[f"{name}_{key}_ms"]) for name in STATISTICS)] for key, title in LATENCIES]
    return table(["", *STATISTICS], rows)


def _split_table(summary: Mapping[str, Any]) -> str:
    split = summary["ttft_split_ms"]
    if not split:
        return ""
    rows = [
        [name.removesuffix("_ms").replace("_", " "), *(number(part[key]) for key in ("mean", "p50", "p99"))]
        for name, part in split.items()
    ]
    return table(["", "mean", "p50", "p99"], rows)


def _causes_table(summary: Mapping[str, Any]) -> str:
    """By the server's own targets, which need not be those of the run."""
    rows = [
        [
            line["cause"].replace("_", " "),
            str(line["num_lost"]),
            f"{line['lost_share']:.1%}",
            f"{line['time_share']:.1%}",
        ]
        for line in summary.get("causes", ())
        if line["num_lost"] or line["time_share"] >= 0.005
    ]
    return table(["cause", "lost", "of requests", "of their time"], rows) if rows else ""


def _failures_table(summary: Mapping[str, Any]) -> str:
    if not summary["failures"]:
        return ""
    rows: list[list[str | Cell]] = []
    for cause, count in sorted(summary["failures"].items(), key=lambda item: -item[1]):
        example = summary["failure_examples"][cause]
        rows.append([cause, str(count), example["kind"], Cell(example["message"], "wrap")])
    return table(["cause", "requests", "kind", Cell("first message", "text")], rows)


def _settings(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for name, value in summary["config"].items():
        if isinstance(value, dict):
            flat += [(f"{name}.{key}", str(inner)) for key, inner in value.items() if inner is not None]
        elif value not in (None, ""):
            flat.append((name, str(value)))
    return [*flat, ("failures", failures_text(summary)), ("targets", slo_text(summary) or "none")]
