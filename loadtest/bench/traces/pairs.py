"""Costs with and without traces, measured in turns within one process, as differences of pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.figures import Result

SAMPLES: tuple[float | None, ...] = (None, 0.01, 1.0)
"""Shares of the requests that are sampled. None: no collector."""
GOALS = {0.01: 2.0, 1.0: 5.0}
"""Most that it may cost by share sampled, percent."""


@dataclass(frozen=True, slots=True)
class More:
    """What traces add, percent of the cost without."""

    middle: float
    """The median of the pairs."""
    low: float
    """With `high`: bounds of the median, right in 95 of 100 such measurements."""
    high: float


def more(costs: Sequence[Sequence[float]], number: int) -> More:
    """Of `SAMPLES[number]`; `costs`: of each round by `SAMPLES`, in any unit.

    Each pair's difference is taken of its own round, and divided by the median without traces: that one round's
    cost is high or low does not weigh its difference. The bounds are order statistics (the sign test's), and so
    assume nothing of how the differences are spread.
    """
    whole = median(round_[0] for round_ in costs)
    found = sorted(100 * (round_[number] - round_[0]) / whole for round_ in costs)
    outer = max(0, math.floor(len(found) / 2 - 0.98 * math.sqrt(len(found))))
    return More(median(found), found[outer], found[-1 - outer])


def order(turn: int) -> list[int]:
    """Indexes of `SAMPLES`; another one begins each round, so that a drift of the machine is nobody's."""
    numbers = list(range(len(SAMPLES)))
    return numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]


def show(name: str, round_: Sequence[float]) -> None:
    """Prints a round's costs as they come, milliseconds by `SAMPLES`."""
    print(f"{name}:", " / ".join(f"{cost:.3f}" for cost in round_), "ms", flush=True)


def results_of(name: str, unit: str, costs: Sequence[Sequence[float]]) -> list[Result]:
    """The median without traces, and for each share what it adds, with its bounds."""
    results = [Result(f"{name}, no traces", median(round_[0] for round_ in costs), unit)]
    for number, sample in enumerate(SAMPLES):
        if sample is not None:
            found = more(costs, number)
            title = f"{name}, {sample:.0%} sampled: more"
            results += [
                Result(title, found.middle, "%", limit=GOALS[sample]),
                Result(f"{title}, at least", found.low, "%"),
                Result(f"{title}, at most", found.high, "%", limit=GOALS[sample]),
            ]
    return results
