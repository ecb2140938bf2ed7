"""What a study shows: figures of each system, comparisons with what they resolve; as tables, a page and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from loadtest import report
from loadtest.baseline.pairs import Interval, Verdict, ratio_interval, verdict
from loadtest.baseline.picture import Bar, interval_chart
from loadtest.baseline.study import AGAIN, Design
from loadtest.baseline.windows import Calibrated, Study, Window
from loadtest.rig import markdown
from loadtest.rig.measure import percentile
from loadtest.rig.results import Result, write, write_text
from loadtest.tables import number

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


@dataclass(frozen=True, slots=True)
class Turn:
    """All windows of one turn of a cell, by round."""

    name: str
    windows: Sequence[Window]

    @property
    def num_requests(self) -> int:
        """Offered."""
        return sum(len(window.good) for window in self.windows)

    @property
    def num_good(self) -> int:
        """Requests that met both targets."""
        return sum(window.good.count("1") for window in self.windows)

    @property
    def window_s(self) -> float:
        """Over which they were offered."""
        return sum(window.window_s for window in self.windows)

    @property
    def goodput(self) -> float:
        """Requests per second."""
        return self.num_good / self.window_s

    @property
    def attainment(self) -> float:
        """Share of the offered requests that were good."""
        return self.num_good / self.num_requests

    def latency(self, key: str, percent: float) -> float | None:
        """A percentile of `ttft`, `tpot` or `itl` over all windows, ms; None without any answer."""
        values = [value for window in self.windows for value in getattr(window, f"{key}_ms")]
        return percentile(values, percent) if values else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One system against another in a cell."""

    of: Turn
    to: Turn
    interval: Interval | None
    verdict: Verdict | None
    """None for a system against itself."""

    @property
    def alone(self) -> tuple[int, int]:
        """Requests that were good with the one system and not with the other, and the other way round."""
        pairs = [
            (mine, theirs)
            for one, other in zip(self.of.windows, self.to.windows, strict=True)
            for mine, theirs in zip(one.outcomes, other.outcomes, strict=True)
        ]
        return pairs.count((True, False)), pairs.count((False, True))


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one load. Only rounds in which every system had its turn count."""

    workload: Calibrated
    load: float
    turns: Mapping[str, Turn]
    comparisons: Sequence[Comparison]
    """The last one is of a system with itself."""

    @property
    def num_invalid(self) -> int:
        """Windows in which the generator was late."""
        return sum(not window.valid for turn in self.turns.values() for window in turn.windows)

    def best_fixed(self, names: Sequence[str]) -> Turn:
        """The one of these turns with the most goodput."""
        return max((self.turns[name] for name in names), key=lambda turn: turn.goodput)


def cells_of(design: Design, study: Study, wanted: int, within: float) -> list[Cell]:
    """The cells with at least one whole round; `wanted` and `within` as in `verdict`."""
    return [
        cell
        for workload in study.workloads.values()
        for load in sorted({window.load for window in study.windows if window.workload == workload.name})
        if (cell := _cell(design, study, workload, load, wanted, within)) is not None
    ]


def _cell(design: Design, study: Study, workload: Calibrated, load: float, wanted: int, within: float) -> Cell | None:
    names = list(design.turns)
    num_rounds = study.next_round(workload.name, load, names)
    if not num_rounds:
        return None
    found = {
        (window.turn, window.round): window
        for window in study.windows
        if (window.workload, window.load) == (workload.name, load)
    }
    turns = {name: Turn(name, [found[name, number] for number in range(num_rounds)]) for name in names}
    again = turns[design.collocated.name + AGAIN], turns[design.collocated.name]
    same = _interval(*again)
    subject, *others = _compared(design)
    comparisons = []
    for other in others:
        of, to = turns[subject], turns[other]
        interval = _interval(of, to)
        comparisons.append(Comparison(of, to, interval, verdict(interval, same, of.num_requests, wanted, within)))
    return Cell(workload, load, turns, [*comparisons, Comparison(*again, same, None)])


def _compared(design: Design) -> list[str]:
    """The system that is compared, then those that it is compared with."""
    fixed = [system.name for system in design.fixed]
    return [design.adaptive.name, *fixed] if design.adaptive is not None else [*fixed[1:], fixed[0]]


def _interval(of: Turn, to: Turn) -> Interval | None:
    return ratio_interval([window.outcomes for window in of.windows], [window.outcomes for window in to.windows])


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
    fixed = [system.name for system in design.fixed]
    for cell in cells:
        for turn in cell.turns.values():
            name = f"{cell.workload.name} {cell.load:g} {turn.name}"
            peer = None
            if design.adaptive is not None and turn.name == design.adaptive.name:
                peer = cell.best_fixed(fixed)
            elif turn.name.endswith(AGAIN):
                peer = cell.turns[design.collocated.name]
            interval = None if peer is None else _interval(turn, peer)
            rows.append(
                Result(
                    f"{name}: goodput",
                    turn.goodput,
                    "req/s",
                    limit=turn.num_requests / turn.window_s,
                    fraction=turn.attainment,
                    peer=None if peer is None else peer.name,
                    ratio=None if interval is None else interval.ratio,
                    low=None if interval is None else interval.low,
                    high=None if interval is None else interval.high,
                )
            )
            rows.append(Result(f"{name}: requests", turn.num_requests, "requests"))
            for key, percent in (("ttft", 50), ("ttft", 99), ("tpot", 50), ("tpot", 99), ("itl", 99)):
                if (value := turn.latency(key, percent)) is not None:
                    rows.append(Result(f"{name}: {key.upper()} p{percent}", value, "ms"))
    return rows


def _capacity_row(workload: Calibrated) -> Result:
    found = workload.capacity
    return Result(f"{workload.name}: capacity", found.rate, "req/s", at_least=found.is_floor or None)


def write_outcome(path: Path, design: Design, cells: Sequence[Cell], origin: str, stopped: str) -> str:
    """The JSON file, and its neighbours `.md` and `.html`; returns the Markdown."""
    text = as_markdown(cells, stopped)
    write(path, results(design, cells))
    write_text(path.with_suffix(".md"), text)
    title = ", ".join(design.turns[name].name for name in _compared(design))
    write_text(path.with_suffix(".html"), as_page(cells, title, origin, stopped))
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
