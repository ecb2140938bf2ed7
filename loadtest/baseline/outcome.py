"""What a study found: a table for people, a page for each workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.baseline.study import Measured
from loadtest.compare import compare
from loadtest.rate_search import Point, highest_at
from loadtest.report.compare_page import render_comparison
from loadtest.results import COMPARISON, REPORT, write_json, write_text
from loadtest.tables import number

COLUMNS = (
    "system",
    "chunks",
    "max goodput ≥ 90%",
    "≥ 99%",
    "same rate",
    "attainment",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
)


def outcome_rows(measured: Sequence[Measured]) -> list[list[str]]:
    """A row a system: its maximum goodput, and its latencies at the highest rate that all systems were measured at."""
    rate = common_rate(measured)
    rows = []
    for found in measured:
        points = found.sweep.points
        row = next((row for row in found.sweep.rows if row["rate"] == rate), None)
        latencies = ["-"] * 4
        if row is not None:
            latencies = [number(row[f"{stat}_{key}_ms"]) for key in ("ttft", "tpot") for stat in ("p50", "p99")]
        rows.append(
            [
                found.system.title,
                str(found.chunk_len),
                _goodput(highest_at(points, found.sweep.space.attainment)),
                _goodput(highest_at(points, 0.99)),
                "-" if rate is None else f"{rate:g}",
                "-" if row is None else f"{row['attainment']:.1%}",
                *latencies,
            ]
        )
    return rows


def common_rate(measured: Sequence[Measured]) -> float | None:
    """The highest rate that every system was measured at; None where there is none."""
    rates = [{point.rate for point in found.sweep.points} for found in measured]
    shared = set.intersection(*rates) if rates else set()
    return max(shared, default=None)


def write_outcome(out: Path, measured: Mapping[str, Sequence[Measured]]) -> str:
    """`comparison.json` and `report.html` in each workload's folder, `outcome.md` above them; returns its text."""
    parts = []
    for workload, found in measured.items():
        config = found[0].sweep.config
        parts.append(f"## {workload}\n\n`{config.workload}`, {config.slo}, seed {config.seed}\n\n{_table(found)}\n")
        if len(found) > 1:
            comparison = compare([one.folder for one in found])
            write_json(out / workload / COMPARISON, comparison.as_json())
            write_text(out / workload / REPORT, render_comparison(comparison))
    text = "\n".join(parts) + (
        "\nGoodput in requests per second that met both targets; latencies in ms, at the rate in the column before.\n"
    )
    write_text(out / "outcome.md", text)
    return text


def _table(measured: Sequence[Measured]) -> str:
    rows = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)], *outcome_rows(measured)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _goodput(point: Point | None) -> str:
    return "none" if point is None else number(point.goodput)
