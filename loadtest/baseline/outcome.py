"""What a study found: a table for people, a page for each workload, figures for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.baseline.contest import Entrant, best_of_each_system
from loadtest.compare import compare
from loadtest.figures import Result, write
from loadtest.markdown import table
from loadtest.rate_search import Point, highest_at, lowest_missed
from loadtest.report.compare_page import render_comparison
from loadtest.results import COMPARISON, REPORT, write_json, write_text
from loadtest.tables import number

COLUMNS = (
    "system",
    "chunks",
    "goodput ≥ 90%",
    "met",
    "missed",
    "≥ 99%",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
)
NOTE = (
    "Maximum goodput at 90 % and at 99 % attainment, the rates between which the limit of 90 % lies (met, missed), all "
    "in requests per second; latencies in ms."
)
_LATENCIES = tuple((f"{stat}_{key}_ms", f"{key.upper()} {stat}") for key in ("ttft", "tpot") for stat in ("p50", "p99"))


def outcome_rows(entrants: Sequence[Entrant], rate: float | None) -> list[list[str]]:
    """A row an entrant: its maximum goodput, between which rates its limit lies, and its latencies.

    Those at `rate`, or, where there is none that all were measured at, at the highest rate that it kept up with itself.
    """
    rows = []
    for entrant in entrants:
        points, wanted = entrant.sweep.points, entrant.sweep.space.attainment
        missed = lowest_missed(points, wanted)
        figures = _row_at(entrant, _rate_of(entrant, rate))
        rows.append(
            [
                entrant.system.title,
                str(entrant.chunk_len),
                "none" if entrant.best is None else number(entrant.best.goodput),
                "-" if entrant.best is None else f"{entrant.best.rate:g}",
                "-" if missed is None else f"{missed.rate:g}",
                _goodput(highest_at(points, 0.99)),
                *("-" if figures is None else number(figures[key]) for key, _ in _LATENCIES),
            ]
        )
    return rows


def common_rate(entrants: Sequence[Entrant]) -> float | None:
    """The highest rate that all were measured at and within their targets; without one, the highest measured by all."""
    points = [{point.rate: point.attainment for point in entrant.sweep.points} for entrant in entrants]
    shared = set.intersection(*(set(rates) for rates in points)) if points else set()
    wanted = entrants[0].sweep.space.attainment if entrants else 0.0
    met = {rate for rate in shared if all(rates[rate] >= wanted for rates in points)}
    return max(met or shared, default=None)


def title(name: str, rate: float | None) -> str:
    """Of a workload's table."""
    return f"{name}, latencies at " + ("the rate that each one met" if rate is None else f"{rate:g} req/s")


def write_outcome(out: Path, measured: Mapping[str, Sequence[Entrant]]) -> str:
    """`comparison.json` and `report.html` of each system's best in each workload's folder, `outcome.md` with all above
    them; returns its text."""
    parts = []
    for workload, entrants in measured.items():
        if not entrants:
            continue
        best = best_of_each_system(entrants)
        rate = common_rate(best)
        config = entrants[0].sweep.config
        parts.append(
            f"## {title(workload, rate)}\n\n`{config.workload}`, {config.slo}, seed {config.seed}\n\n"
            f"{table(COLUMNS, outcome_rows(entrants, rate))}\n"
        )
        if len(best) > 1:
            comparison = compare([entrant.folder for entrant in best])
            write_json(out / workload / COMPARISON, comparison.as_json())
            write_text(out / workload / REPORT, render_comparison(comparison))
    text = "\n".join([*parts, NOTE + "\n"])
    write_text(out / "outcome.md", text)
    return text


def write_figures(path: Path, measured: Mapping[str, Sequence[Entrant]]) -> None:
    """The form of every benchmark's results, `{"machine": …, "commit": …, "results": […]}`.

    Disaggregated goodput has the best collocated baseline as its peer.
    """
    results = []
    for workload, entrants in measured.items():
        best = best_of_each_system(entrants)
        rate = common_rate(best)
        baseline = max((e for e in best if e.system.mode == "collocated"), key=lambda e: e.goodput, default=None)
        for entrant in best:
            name = f"{workload}, {entrant.system.title}, chunks of {entrant.chunk_len}"
            peer = baseline if entrant.system.mode == "disaggregated" else None
            ratio = entrant.goodput / peer.goodput if peer is not None and peer.goodput else None
            results.append(
                Result(
                    f"{name}: max goodput",
                    entrant.goodput,
                    "req/s",
                    peer=None if peer is None else peer.system.title,
                    ratio=ratio,
                )
            )
            at = _rate_of(entrant, rate)
            figures = _row_at(entrant, at) or {}
            for key, latency in _LATENCIES:
                if (value := figures.get(key)) is not None:
                    results.append(Result(f"{name}: {latency} at {at:g} req/s", value, "ms"))
    write(path, results)


def _rate_of(entrant: Entrant, common: float | None) -> float | None:
    own = None if entrant.best is None else entrant.best.rate
    return own if common is None else common


def _row_at(entrant: Entrant, rate: float | None) -> Mapping[str, float | None] | None:
    return next((row for row in entrant.sweep.rows if row["rate"] == rate), None)


def _goodput(point: Point | None) -> str:
    return "none" if point is None else number(point.goodput)
