"""Results as a page of Markdown: what the terminal shows, and the tables behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.rig.markdown import table
from loadtest.tables import doubts, latency_table, number, run_facts, slo_text

_DEFINITIONS = (
    "TTFT: from sending the request to the first token, at the client. TPOT: (last token - first token) / (tokens - 1) "
    "of a request. ITL: each gap between tokens. E2E: from sending to the last token. Attainment: share of the offered "
    "requests that were answered and met both targets. Goodput: such requests per second of the time over which "
    "requests were offered. Latencies are of complete answers; percentiles are interpolated linearly."
)
_POINT_COLUMNS = (
    "", "rate", "offered", "goodput", "attainment", "TTFT p50", "p99", "TPOT p50", "p99", "out tok/s", "failed",
)  # fmt: skip


def render_run(summary: Mapping[str, Any]) -> str:
    """The page of one run, from the content of `summary.json`."""
    parts = [
        *doubts(summary),
        table(("", ""), run_facts(summary), left=(0, 1)),
        "## Latency, ms",
        latency_table(summary),
    ]
    parts += _section("Server's TTFT split, ms", ("", "mean", "p50", "p99"), _split_rows(summary))
    parts += _section("What bound it", ("cause", "lost", "of requests", "of their time"), _cause_rows(summary))
    parts += _section(
        "Failures", ("cause", "requests", "kind", "first message"), _failure_rows(summary), left=(0, 2, 3)
    )
    return _page(summary["label"] or summary["workload"], summary, parts)


def render_sweeps(title: str, sweeps: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of one or several sweeps under one workload, by their names, from the contents of `sweep.json`.

    Raises IndexError if there is none.
    """
    points = [
        _point_cells(name, row)
        for name, sweep in sweeps.items()
        for row in sorted(sweep["points"], key=lambda row: row["offered_rate"])
    ]
    parts = [
        *(f"**Partial:** {sweep['partial_reason']}" for sweep in sweeps.values() if sweep["partial"]),
        table(("", "max goodput, req/s", "at ≥ 99%", "knee, req/s offered"), _best_rows(sweeps)),
        *_section("Points", _POINT_COLUMNS, points),
    ]
    return _page(title, next(iter(sweeps.values())), parts)


def _page(title: str, found: Mapping[str, Any], parts: Sequence[str]) -> str:
    """`found`: a summary or a sweep, which says what was asked of which target."""
    slo = slo_text(found) or "no targets"
    names = (found["target"], found["model_id"], found["workload"], slo, f"seed {found['seed']}", found["date"])
    return "\n\n".join([f"# {title}", " · ".join(names), *parts, _DEFINITIONS]) + "\n"


def _section(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> list[str]:
    return [f"## {title}", table(columns, rows, left)] if rows else []


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
        [cause, str(count), examples[cause]["kind"], _one_line(examples[cause]["message"])]
        for cause, count in sorted(summary["failures"].items(), key=lambda item: -item[1])
    ]


def _one_line(message: str) -> str:
    """What a server said, as a cell of a table."""
    return " ".join(message.split()).replace("|", r"\|")


def _best_rows(sweeps: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for name, sweep in sweeps.items():
        best, strict, bend = sweep["max_goodput"], sweep["max_goodput_at_99"], sweep["knee"]
        found = "none" if best is None else f"{number(best['goodput'])} of {number(best['offered_rate'])} offered"
        if best is not None and not sweep["limit_found"]:
            found += " (no rate missed the targets: the limit is higher)"
        at_99 = "none" if strict is None else number(strict["goodput"])
        rows.append([name, found, at_99, "not reached" if bend is None else number(bend["offered_rate"])])
    return rows


def _point_cells(name: str, row: Mapping[str, Any]) -> list[str]:
    return [
        name,
        f"{row['rate']:g}",
        number(row["offered_rate"]),
        number(row["goodput"]),
        f"{row['attainment']:.1%}" + ("" if row["valid"] else " (invalid)"),
        *(number(row[f"{stat}_{key}_ms"]) for key in ("ttft", "tpot") for stat in ("p50", "p99")),
        number(row["output_throughput"]),
        str(row["failed"]),
    ]
