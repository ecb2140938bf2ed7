"""The results of a study: a table for people, a page for each workload, figures for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.baseline.interleaved import Candidate, best_of_each_system
from loadtest.rate_search import Point, highest_at, lowest_missed
from loadtest.report import render_sweeps
from loadtest.results import REPORT
from loadtest.rig.markdown import table
from loadtest.rig.results import Result, write, write_text
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
    "Maximum goodput at 90 % and at 99 % attainment, and the rates between which the limit of 90 % lies (met, missed), "
    "all in requests per second; latencies in ms."
)
_LATENCIES = tuple((f"{stat}_{key}_ms", f"{key.upper()} {stat}") for key in ("ttft", "tpot") for stat in ("p50", "p99"))


def outcome_rows(candidates: Sequence[Candidate], rate: float | None) -> list[list[str]]:
    """A row for each candidate: its maximum goodput, the rates between which its limit lies, and its latencies.

    Latencies at `rate`, or, without a rate that all were measured at, at the highest rate that the candidate met.
    """
    rows = []
    for candidate in candidates:
        points, wanted = candidate.sweep.points, candidate.sweep.space.attainment
        missed = lowest_missed(points, wanted)
        figures = _row_at(candidate, _rate_of(candidate, rate))
        rows.append(
            [
                candidate.system.title,
                str(candidate.chunk_len),
                "none" if candidate.best is None else number(candidate.best.goodput),
                "-" if candidate.best is None else f"{candidate.best.rate:g}",
                "-" if missed is None else f"{missed.rate:g}",
                _goodput(highest_at(points, 0.99)),
                *("-" if figures is None else number(figures[key]) for key, _ in _LATENCIES),
            ]
        )
    return rows


def common_rate(candidates: Sequence[Candidate]) -> float | None:
    """The highest rate measured for all and within all their targets; without one, the highest measured for all."""
    points = [{point.rate: point.attainment for point in candidate.sweep.points} for candidate in candidates]
    shared = set.intersection(*(set(rates) for rates in points)) if points else set()
    wanted = candidates[0].sweep.space.attainment if candidates else 0.0
    met = {rate for rate in shared if all(rates[rate] >= wanted for rates in points)}
    return max(met or shared, default=None)


def title(name: str, rate: float | None) -> str:
    """The title of a workload's table."""
    return f"{name}, latencies at " + ("the rate that each one met" if rate is None else f"{rate:g} req/s")


def write_outcome(out: Path, measured: Mapping[str, Sequence[Candidate]]) -> str:
    """Each workload's `report.html` about its systems' best, and `outcome.md` about all of them; returns its text."""
    parts = []
    for workload, candidates in measured.items():
        if not candidates:
            continue
        best = best_of_each_system(candidates)
        rate = common_rate(best)
        config = candidates[0].sweep.config
        parts.append(
            f"## {title(workload, rate)}\n\n`{config.workload}`, {config.slo}, seed {config.seed}\n\n"
            f"{table(COLUMNS, outcome_rows(candidates, rate))}\n"
        )
        sweeps = {f"{e.system.title}, chunks of {e.chunk_len}": e.sweep.as_json() for e in best}
        write_text(out / workload / REPORT, render_sweeps(workload, sweeps))
    text = "\n".join([*parts, NOTE + "\n"])
    write_text(out / "outcome.md", text)
    return text


def write_figures(path: Path, measured: Mapping[str, Sequence[Candidate]]) -> None:
    """The format of every benchmark's results, `{"machine": …, "commit": …, "results": […]}`.

    Disaggregated goodput has the best collocated baseline as its peer.
    """
    results = []
    for workload, candidates in measured.items():
        best = best_of_each_system(candidates)
        rate = common_rate(best)
        baseline = max((e for e in best if e.system.mode == "collocated"), key=lambda e: e.goodput, default=None)
        for candidate in best:
            name = f"{workload}, {candidate.system.title}, chunks of {candidate.chunk_len}"
            peer = baseline if candidate.system.mode == "disaggregated" else None
            ratio = candidate.goodput / peer.goodput if peer is not None and peer.goodput else None
            results.append(
                Result(
                    f"{name}: max goodput",
                    candidate.goodput,
                    "req/s",
                    peer=None if peer is None else peer.system.title,
                    ratio=ratio,
                )
            )
            at = _rate_of(candidate, rate)
            figures = _row_at(candidate, at) or {}
            for key, latency in _LATENCIES:
                if (value := figures.get(key)) is not None:
                    results.append(Result(f"{name}: {latency} at {at:g} req/s", value, "ms"))
    write(path, results)


def _rate_of(candidate: Candidate, common: float | None) -> float | None:
    own = None if candidate.best is None else candidate.best.rate
    return own if common is None else common


def _row_at(candidate: Candidate, rate: float | None) -> Mapping[str, float | None] | None:
    return next((row for row in candidate.sweep.rows if row["rate"] == rate), None)


def _goodput(point: Point | None) -> str:
    return "none" if point is None else number(point.goodput)
