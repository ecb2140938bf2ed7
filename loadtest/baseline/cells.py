"""What a study measured, by workload and load: figures of each system, and comparisons with what they resolve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.baseline.design import AGAIN, Design
from loadtest.baseline.pairs import Interval, Verdict, ratio_interval, verdict
from loadtest.baseline.windows import Calibrated, Study, Window
from loadtest.rig.measure import percentile


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
    same = interval_of(*again)
    subject, *others = compared(design)
    comparisons = []
    for other in others:
        of, to = turns[subject], turns[other]
        interval = interval_of(of, to)
        comparisons.append(Comparison(of, to, interval, verdict(interval, same, of.num_requests, wanted, within)))
    return Cell(workload, load, turns, [*comparisons, Comparison(*again, same, None)])


def compared(design: Design) -> list[str]:
    """The system that is compared, then those that it is compared with."""
    fixed = [system.name for system in design.fixed]
    return [design.adaptive.name, *fixed] if design.adaptive is not None else [*fixed[1:], fixed[0]]


def interval_of(of: Turn, to: Turn) -> Interval | None:
    """Interval of the ratio of goodput; None where it cannot be told."""
    return ratio_interval([window.outcomes for window in of.windows], [window.outcomes for window in to.windows])
