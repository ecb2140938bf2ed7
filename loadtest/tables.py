"""Results as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

LATENCIES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "E2E"))
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def print_run(console: Console, summary: Mapping[str, Any]) -> None:
    """The figures of one run."""
    print_warnings(console, summary)
    table = Table(title="Latency, ms", title_justify="left")
    table.add_column("")
    for name in STATISTICS:
        table.add_column(name, justify="right")
    for key, title in LATENCIES:
        table.add_row(title, *(number(summary[f"{name}_{key}_ms"]) for name in STATISTICS))
    console.print(table)
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in run_facts(summary):
        facts.add_row(escape(name), escape(value))
    console.print(facts)


def print_warnings(console: Console, summary: Mapping[str, Any]) -> None:
    """Prints why the figures are not to be trusted."""
    for reason in summary["invalid_reasons"]:
        console.print(f"[bold red]INVALID[/]: {escape(reason)}")
    if summary["partial"]:
        console.print(f"[bold yellow]PARTIAL[/]: {escape(summary['partial_reason'])}")


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
