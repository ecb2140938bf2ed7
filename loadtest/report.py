"""Results as self-contained HTML pages: tables and charts, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from loadtest.chart import Axis, line_chart, round_up
from loadtest.metrics import request_metrics
from loadtest.records import RequestRecord
from loadtest.terminal_tables import LATENCIES, STATISTICS, number, run_facts, slo_text

STYLE = """
:root { color-scheme: light dark; --dim: #6b7686; --rule: #8884;
  --s0: #2f6bd8; --s1: #7d8794; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 28px auto; padding: 0 20px; }
h2 { font-size: 17px; margin-top: 32px; }
.dim { color: var(--dim); overflow-wrap: anywhere; }
.banner { border-left: 4px solid #b3261e; padding: 8px 14px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 18px; }
figure { margin: 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: 5px 14px 5px 0; text-align: right; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--dim); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: currentColor; }
svg .tick { fill: var(--dim); }
svg .grid, svg .axis { stroke: var(--rule); }
svg .limit { stroke: #d1435b; stroke-dasharray: 5 4; }
svg .line { fill: none; stroke: var(--c); stroke-width: 2; }
svg .bar { fill: var(--c); }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); }
"""
_MAX_POINTS = 400
"""Most points of one line: more cannot be seen."""
_DEFINITIONS = (
    "TTFT: from sending the request to the first token, at the client. TPOT: (last token - first token) / (tokens - 1) "
    "of a request. ITL: each gap between tokens. E2E: from sending to the last token. Attainment: share of the offered "
    "requests that were answered and met both targets. Goodput: such requests per second of the time over which "
    "requests were offered. Latencies are of complete answers; percentiles are interpolated linearly."
)


def render_run(summary: Mapping[str, Any], records: Sequence[RequestRecord]) -> str:
    """The page of one run, from the content of `summary.json` and its requests."""
    reasons = [*summary["invalid_reasons"], *([summary["partial_reason"]] if summary["partial"] else [])]
    parts = [
        *(f'<p class="banner"><b>Not to be trusted:</b> {escape(reason)}</p>' for reason in reasons),
        table(["", ""], [list(fact) for fact in run_facts(summary)]),
        "<h2>Latency, ms</h2>",
        table(["", *STATISTICS], _latency_rows(summary)),
        _plots(_distributions(summary, records)),
    ]
    parts += _section("Server's TTFT split, ms", ("", "mean", "p50", "p99"), _split_rows(summary))
    parts += _section("What bound it", ("cause", "lost", "of requests", "of their time"), _cause_rows(summary))
    parts += _section("Failures", ("cause", "requests", "kind", "first message"), _failure_rows(summary))
    return page(summary["label"] or summary["workload"], _origin(summary), parts)


def render_sweep(sweep: Mapping[str, Any]) -> str:
    """The page of a sweep, from the content of `sweep.json`."""
    points = sorted(sweep["points"], key=lambda row: row["offered_rate"])
    columns = ("rate", "offered", "goodput", "attainment", "TTFT p50", "p99", "TPOT p50", "p99", "out tok/s", "failed")
    partial = [f'<p class="banner"><b>Partial:</b> {escape(sweep["partial_reason"])}</p>'] if sweep["partial"] else []
    parts = [
        *partial,
        table(("max goodput, req/s", "at ≥ 99%", "knee, req/s offered"), [_best_cells(sweep)]),
        _plots(_rate_plots(points, sweep)),
        "<h2>Points</h2>",
        table(columns, [_point_cells(row) for row in points]),
    ]
    return page(sweep["label"] or sweep["workload"], _origin(sweep), parts)


def page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    """A complete HTML document with these parts and the definitions."""
    body = "\n".join([*parts, f'<p class="dim">{_DEFINITIONS}</p>'])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<p class="dim">{escape(subtitle)}</p>\n'
        f"{body}\n</body>\n</html>\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text whose first column is aligned left."""
    lines = ["".join(f"<th>{escape(name)}</th>" for name in columns)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _section(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", table(columns, rows)] if rows else []


def _plots(drawings: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(f"<figure>{drawing}</figure>" for drawing in drawings if drawing)}</div>'


def _origin(found: Mapping[str, Any]) -> str:
    """What a summary or a sweep asked of which target."""
    slo = slo_text(found) or "no targets"
    names = (found["target"], found["model_id"], found["workload"], slo, f"seed {found['seed']}", found["date"])
    return " · ".join(names)


def _latency_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    return [[title, *(number(summary[f"{stat}_{key}_ms"]) for stat in STATISTICS)] for key, title in LATENCIES]


def _split_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    return [
        [name.removesuffix("_ms").replace("_", " "), *(number(part[key]) for key in ("mean", "p50", "p99"))]
        for name, part in summary["ttft_split_ms"].items()
    ]


def _cause_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """By the server's own targets, which need not be those of the run."""
    return [
        [
            line["cause"].replace("_", " "),
            str(line["num_lost"]),
            f"{line['lost_share']:.1%}",
            f"{line['time_share']:.1%}",
        ]
        for line in summary["causes"]
        if line["num_lost"] or line["time_share"] >= 0.005
    ]


def _failure_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    examples = summary["failure_examples"]
    return [
        [cause, str(count), examples[cause]["kind"], examples[cause]["message"]]
        for cause, count in sorted(summary["failures"].items(), key=lambda item: -item[1])
    ]


def _distributions(summary: Mapping[str, Any], records: Sequence[RequestRecord]) -> list[str]:
    """Cumulative distributions of TTFT and TPOT over the complete answers, with their targets."""
    found = [metrics for record in records if (metrics := request_metrics(record)) is not None]
    slo = summary["slo_ms"] or {}
    values = {"ttft": [m.ttft_s * 1e3 for m in found], "tpot": [m.tpot_s * 1e3 for m in found if m.tpot_s is not None]}
    drawings = []
    for key, times_ms in values.items():
        ordered = np.sort(times_ms)
        chosen = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _MAX_POINTS)).astype(int))
        points = [(float(ordered[i]), (int(i) + 1) / len(ordered)) for i in chosen]
        target = slo.get(key)
        high = round_up(max(max(times_ms, default=0.0), 1.1 * (target or 0.0)))
        x, y = Axis(f"{key.upper()}, ms", high, target), Axis("share of answers", 1.0)
        drawings.append(line_chart(f"Distribution of {key.upper()}", x, y, points))
    return drawings


def _best_cells(sweep: Mapping[str, Any]) -> list[str]:
    best, strict, bend = sweep["max_goodput"], sweep["max_goodput_at_99"], sweep["knee"]
    found = "none" if best is None else f"{number(best['goodput'])} of {number(best['offered_rate'])} offered"
    if best is not None and not sweep["limit_found"]:
        found += " (no rate missed the targets: the limit is higher)"
    at_99 = "none" if strict is None else number(strict["goodput"])
    return [found, at_99, "not reached" if bend is None else number(bend["offered_rate"])]


def _rate_plots(points: Sequence[Mapping[str, Any]], sweep: Mapping[str, Any]) -> list[str]:
    """Goodput, attainment and the latencies' p99 against the offered rate."""
    high = round_up(max((row["offered_rate"] for row in points), default=0.0))
    drawings = []
    for key, title, limit in (
        ("goodput", "goodput, req/s", None),
        ("attainment", "attainment", sweep["wanted_attainment"]),
        ("p99_ttft_ms", "TTFT p99, ms", sweep["slo_ms"]["ttft"]),
        ("p99_tpot_ms", "TPOT p99, ms", sweep["slo_ms"]["tpot"]),
    ):
        most = max((row[key] for row in points if row[key] is not None), default=0.0)
        if key.endswith("_ms") and limit is not None:
            most = max(min(most, 4 * limit), 1.2 * limit)  # values far above the target are put on the edge
        y = Axis(title, 1.0 if key == "attainment" else round_up(most), limit)
        line = [(row["offered_rate"], row[key]) for row in points if row[key] is not None]
        drawings.append(line_chart(f"{title} against rate", Axis("offered, req/s", high), y, line))
    return drawings


def _point_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['rate']:g}",
        number(row["offered_rate"]),
        number(row["goodput"]),
        f"{row['attainment']:.1%}" + ("" if row["valid"] else " (invalid)"),
        *(number(row[f"{stat}_{key}_ms"]) for key in ("ttft", "tpot") for stat in ("p50", "p99")),
        number(row["output_throughput"]),
        str(row["failed"]),
    ]
