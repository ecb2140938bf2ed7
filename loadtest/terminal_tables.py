"""Results as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadtest.rate_search import Point
from loadtest.rig import markdown

LATENCIES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "E2E"))
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def run_text(summary: Mapping[str, Any]) -> str:
    """The figures of one run: why they are not to be trusted, latencies, other facts."""
    rows = [[title, *(number(summary[f"{name}_{key}_ms"]) for name in STATISTICS)] for key, title in LATENCIES]
    width = max(len(name) for name, _ in run_facts(summary))
    return "\n".join(
        [
            *(f"INVALID: {reason}" for reason in summary["invalid_reasons"]),
            *([f"PARTIAL: {summary['partial_reason']}"] if summary["partial"] else []),
            "Latency, ms\n",
            markdown.table(("", *STATISTICS), rows),
            "",
            *(f"{name:{width}}  {value}" for name, value in run_facts(summary)),
        ]
    )


def point_text(name: str, point: Point, row: Mapping[str, Any]) -> str:
    """The figures of one rate of a sweep, from its point and its row in `sweep.json`."""
    return (
        f"{name}: goodput {number(point.goodput)} req/s, attainment {point.attainment:.1%}, "
        f"TTFT p99 {number(row['p99_ttft_ms'])} ms, TPOT p99 {number(row['p99_tpot_ms'])} ms"
        + ("" if point.valid else "  invalid")
    )


def sweep_text(found: Mapping[str, Any]) -> str:
    """The limit that a sweep found, from the content of `sweep.json`."""
    best, bend = found["max_goodput"], found["knee"]
    wanted = f"{found['wanted_attainment']:.0%}"
    lines = [f"PARTIAL: {found['partial_reason']}"] if found["partial"] else []
    if best is None:
        return "\n".join([*lines, f"no measured rate met the targets for {wanted} of the requests"])
    limit = "" if found["limit_found"] else "; no rate missed the targets, so the limit is higher"
    lines.append(
        f"max goodput at ≥ {wanted}: {number(best['goodput'])} req/s "
        f"({best['attainment']:.1%} of {number(best['offered_rate'])} req/s offered{limit})"
    )
    if bend is not None:
        lines.append(f"knee at {number(bend['offered_rate'])} req/s offered")
    return "\n".join(lines)


def run_facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A run's other facts, as name and text."""
    facts = [
        (
            "offered",
            f"{summary['offered']} requests in {number(summary['window'])} s = {number(summary['offered_rate'])} req/s",
        ),
        (
            "completed",
            f"{summary['completed']} = {number(summary['request_throughput'])} req/s ({number(summary['duration'])} s)",
        ),
    ]
    if summary["goodput"] is not None:
        facts.append(
            (
                "goodput",
                f"{number(summary['goodput'])} req/s = {summary['attainment']:.1%} of offered ({slo_text(summary)})",
            )
        )
    facts.append(("failed", failures_text(summary)))
    facts.append(
        ("tokens", f"{number(summary['input_throughput'])} in/s, {number(summary['output_throughput'])} out/s")
    )
    if summary["cached_share"] is not None:
        ideal = summary["ideal_cached_share"]
        limit = f" (an unlimited cache: {ideal:.1%})" if ideal is not None else ""
        facts.append(("cached", f"{summary['cached_share']:.1%} of the prompt tokens{limit}"))
    if not summary["token_counts_exact"]:
        facts.append(("note", "the server sends no token ids: counts are from its usage, ITL is per message"))
    lag = summary["schedule_lag_ms"]
    if lag is not None:
        facts.append(("schedule lag", f"p50 {lag['p50']:.2f}, p99 {lag['p99']:.2f}, max {lag['max']:.2f} ms"))
    facts.append(("seed", str(summary["seed"])))
    return facts


def failures_text(summary: Mapping[str, Any]) -> str:
    """`3 (2 overloaded, 1 timeout)`."""
    if not summary["failed"]:
        return "none"
    causes = sorted(summary["failures"].items(), key=lambda item: -item[1])
    return f"{summary['failed']} ({', '.join(f'{count} {cause}' for cause, count in causes)})"


def slo_text(summary: Mapping[str, Any]) -> str:
    """`TTFT ≤ 200 ms, TPOT ≤ 30 ms`."""
    slo = summary["slo_ms"] or {}
    return ", ".join(f"{name.upper()} ≤ {value:g} ms" for name, value in slo.items() if value is not None)


def number(value: float | None) -> str:
    """Three significant digits, four from 1000 on; a dash for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
