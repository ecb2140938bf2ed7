"""A study as tables, a page and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from loadtest import report
from loadtest.baseline.cells import Cell, Turn, compared, interval_of
from loadtest.baseline.design import AGAIN, Design
from loadtest.baseline.picture import Bar, interval_chart
from loadtest.baseline.windows import Calibrated
from loadtest.rig import markdown
from loadtest.rig.results import Result, write, write_text
from loadtest.terminal_tables import number

_FIGURES = ("load", "system", "chunks", "requests", "goodput", "attainment", "TTFT p50", "p99", "TPOT p50", "p99",
            "ITL p99")  # fmt: skip
_COMPARED = ("load", "systems", "good of one alone", "ratio of goodput", "95 % interval", "")
_HIGHEST = 99.0
"""Bound that is shown: from two rounds an interval may be anything."""
NOTE = (
    "Load: share of the capacity, the requests/s of which the collocated system serves nine in ten in time. "
    "Goodput: requests/s that met both targets; attainment: their share of all offered requests, refused and failed "
    "ones included. Latencies in ms, of complete answers. All systems got the same requests at the same times, in "
    "turns. Intervals by bootstrap over rounds. The row of a system against itself shows what the machine does; no "
    "difference within that is named."
)


def figure_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """A row for each system of each cell."""
    return [
        [
            f"{cell.load:g}",
            turn.name,
            turn.windows[-1].chunk,
            str(turn.num_requests),
            number(turn.goodput),
            f"{turn.attainment:.1%}",
            *(number(turn.latency(key, percent)) for key in ("ttft", "tpot") for percent in (50, 99)),
            number(turn.latency("itl", 99)),
        ]
        for cell in cells
        for turn in cell.turns.values()
    ]


def comparison_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """A row for each comparison of each cell."""
    rows = []
    for cell in cells:
        for made in cell.comparisons:
            found = made.interval
            mine, theirs = made.alone
            rows.append(
                [
                    f"{cell.load:g}",
                    f"{made.of.name} / {made.to.name}",
                    f"{mine} / {theirs}",
                    "-" if found is None else f"{found.ratio:.3f}",
                    "-" if found is None else f"{found.low:.3f}-{min(found.high, _HIGHEST):.3f}",
                    "what the machine does" if made.verdict is None else made.verdict.text,
                ]
            )
    return rows


def summary_lines(cells: Sequence[Cell], stopped: str) -> list[str]:
    """What was not resolved, and what else a reader has to know."""
    made = [comparison for cell in cells for comparison in cell.comparisons if comparison.verdict is not None]
    open_ones = sum(comparison.verdict is not None and not comparison.verdict.resolved for comparison in made)
    lines = [f"Partial: {stopped}."] if stopped else []
    lines.append(f"{len(made) - open_ones} of {len(made)} comparisons are resolved.")
    if invalid := sum(cell.num_invalid for cell in cells):
        lines.append(f"In {invalid} windows the generator was late: their latencies are too high for every system.")
    differing = [
        f"{cell.workload.name} {cell.load:g}"
        for cell in cells
        if (same := cell.comparisons[-1].interval) is not None and not same.low <= 1 <= same.high
    ]
    if differing:
        lines.append(f"A system differs from itself in {', '.join(differing)}.")
    commits = {window.commit for cell in cells for turn in cell.turns.values() for window in turn.windows}
    if len(commits) > 1:
        lines.append(f"The windows are of several commits: {', '.join(sorted(commits))}.")
    return lines


def as_markdown(cells: Sequence[Cell], stopped: str) -> str:
    """Two tables a workload, and what was not resolved."""
    parts = ["\n".join(summary_lines(cells, stopped))]
    for workload, of_it in _by_workload(cells).items():
        found = of_it[0].workload
        parts += [
            f"## {workload}\n\n`{found.spec}`, {found.slo}, capacity {found.capacity}",
            markdown.table(_FIGURES, figure_rows(of_it), left=(0, 1)),
            markdown.table(_COMPARED, comparison_rows(of_it), left=(0, 1, 5)),
        ]
    return "\n\n".join([*parts, NOTE]) + "\n"


def as_page(cells: Sequence[Cell], title: str, origin: str, stopped: str) -> str:
    """The table of cells as an HTML page, with the intervals drawn."""
    parts = [f"<p>{escape(line)}</p>" for line in summary_lines(cells, stopped)]
    for workload, of_it in _by_workload(cells).items():
        parts += [
            f"<h2>{workload}</h2>",
            f'<p class="dim">{_workload_line(of_it[0].workload)}</p>',
            interval_chart(f"Ratios of goodput, {workload}", _bars(of_it)),
            report.table(_FIGURES, figure_rows(of_it)),
            report.table(_COMPARED, comparison_rows(of_it)),
        ]
    return report.page(title, origin, [*parts, f'<p class="dim">{NOTE}</p>'])


def results(design: Design, cells: Sequence[Cell]) -> list[Result]:
    """`WORKLOAD: capacity` for each workload, and `WORKLOAD LOAD SYSTEM: goodput` for each system, with its attainment
    as the fraction of the offered rate. The adaptive system has its ratio to the best fixed one, the second turn of a
    system that to its first."""
    rows = [_capacity_row(of_it[0].workload) for of_it in _by_workload(cells).values()]
    for cell in cells:
        for turn in cell.turns.values():
            rows += _turn_rows(f"{cell.workload.name} {cell.load:g} {turn.name}", turn, _peer(design, cell, turn))
    return rows


def _peer(design: Design, cell: Cell, turn: Turn) -> Turn | None:
    if design.adaptive is not None and turn.name == design.adaptive.name:
        return cell.best_fixed([system.name for system in design.fixed])
    return cell.turns[design.collocated.name] if turn.name.endswith(AGAIN) else None


def _turn_rows(name: str, turn: Turn, peer: Turn | None) -> list[Result]:
    goodput = Result(
        f"{name}: goodput",
        turn.goodput,
        "req/s",
        limit=turn.num_requests / turn.window_s,
        fraction=turn.attainment,
        peer=None if peer is None else peer.name,
    )
    if peer is not None and (found := interval_of(turn, peer)) is not None:
        goodput = replace(goodput, ratio=found.ratio, low=found.low, high=found.high)
    rows = [goodput, Result(f"{name}: requests", turn.num_requests, "requests")]
    for key, percent in (("ttft", 50), ("ttft", 99), ("tpot", 50), ("tpot", 99), ("itl", 99)):
        if (value := turn.latency(key, percent)) is not None:
            rows.append(Result(f"{name}: {key.upper()} p{percent}", value, "ms"))
    return rows


def _capacity_row(workload: Calibrated) -> Result:
    found = workload.capacity
    return Result(f"{workload.name}: capacity", found.rate, "req/s", at_least=found.is_floor or None)


def beside(path: Path, suffix: str) -> Path:
    """The neighbour of a study's JSON file: in place of `.json`, or behind a name that ends otherwise, so that the
    studies v0.1 and v0.2 have files of their own."""
    return path.with_suffix(suffix) if path.suffix == ".json" else path.with_name(path.name + suffix)


def write_outcome(path: Path, design: Design, cells: Sequence[Cell], origin: str, stopped: str) -> str:
    """The JSON file, and its neighbours `.md` and `.html`; returns the Markdown."""
    text = as_markdown(cells, stopped)
    write(path, results(design, cells))
    write_text(beside(path, ".md"), text)
    title = ", ".join(design.turns[name].name for name in compared(design))
    write_text(beside(path, ".html"), as_page(cells, title, origin, stopped))
    return text


def _workload_line(workload: Calibrated) -> str:
    return escape(f"{workload.spec} · {workload.slo} · capacity {workload.capacity}")


def _by_workload(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.workload.name, []).append(cell)
    return found


def _bars(cells: Sequence[Cell]) -> list[Bar]:
    return [
        Bar(f"{cell.load:g}: {made.of.name} / {made.to.name}", made.interval, made.verdict is None)
        for cell in cells
        for made in cell.comparisons
        if made.interval is not None
    ]
