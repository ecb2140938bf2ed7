"""What no cell shows: a mix that turns over, and workers of two speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from loadtest.simulator.outcome import Targets
from loadtest.simulator.request import SimRequest
from loadtest.simulator.simulation import AUTO, play
from loadtest.simulator.split_study.cells import Compared, Loads, compare
from loadtest.simulator.split_study.search import Search, capacity
from loadtest.simulator.split_study.systems import Pool, System
from loadtest.workloads.trace import TraceRequest

PHASES = ("prefill-heavy", "decode-heavy", "prefill-heavy")
PHASE_LOAD = 0.9
"""Load of each phase, as a share of its own capacity."""
WINDOW_S = 5.0
SETTLED = 0.9
"""Share of a phase's best goodput from which on a system has found its new balance."""


class Turnover(NamedTuple):
    """Mixes that follow each other."""

    compared: Compared
    settled_s: list[float]
    """After each change, seconds until auto has SETTLED of what the best static system of that phase has."""


def turnover(pool: Pool, targets: Targets, loads: Loads, phase_s: float) -> Turnover:
    """Each phase at PHASE_LOAD of its own capacity, one behind the other."""
    parts: list[list[TraceRequest]] = []
    bests: list[float] = []
    starts: list[System] = []
    for number, workload in enumerate(PHASES):
        rate, found = capacity(pool, targets, lambda rate, workload=workload: loads.requests(workload, rate))  # type: ignore[misc]
        alone = replace(loads, seconds=phase_s, seed=loads.seed + number).requests(workload, PHASE_LOAD * rate)
        alone = [request for request in alone if request.at_s < phase_s]
        search = Search(pool, targets, alone)
        bests.append(search.runs[search.best(found)].goodput)
        parts.append([replace(request, at_s=request.at_s + number * phase_s) for request in alone])
        starts = starts or found
    requests = [request for part in parts for request in part]
    search = Search(pool, targets, requests)
    compared = compare(search, search.best(starts))
    played = play(requests, 1.0, AUTO, pool.setup(System(AUTO), targets))
    settled = [
        settled_after(played, targets, number * phase_s, phase_s, SETTLED * best)
        for number, best in enumerate(bests)
        if number
    ]
    return Turnover(compared, settled)


def settled_after(played: Sequence[SimRequest], targets: Targets, from_s: float, for_s: float, goodput: float) -> float:
    """Seconds until the first window from which on, in the mean of the windows left, requests/s in time reach that
    goodput; `for_s` where they never do."""
    counts = [0] * max(1, round(for_s / WINDOW_S))
    for request in played:
        place = int((request.at_s - from_s) // WINDOW_S)
        if 0 <= place < len(counts):
            counts[place] += targets.met_by(request)
    for first, count in enumerate(counts):
        rest = counts[first:]
        if count / WINDOW_S >= goodput and sum(rest) / (WINDOW_S * len(rest)) >= goodput:
            return first * WINDOW_S
    return for_s


def two_speeds(pool: Pool, targets: Targets, loads: Loads, workload: str, load: float) -> Compared:
    """At a load of the best static assignment's capacity."""
    rate, starts = capacity(pool, targets, lambda rate: loads.requests(workload, rate))
    search = Search(pool, targets, loads.requests(workload, load * rate))
    return compare(search, search.best(starts))
