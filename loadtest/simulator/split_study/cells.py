"""The cells of the study: a workload at a load under a pair of targets, and what each of them needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from loadtest.simulator.load import WORKLOADS, at_rate, poisson
from loadtest.simulator.outcome import Targets
from loadtest.simulator.simulation import AUTO, COLLOCATED
from loadtest.simulator.split_study.runs import Key
from loadtest.simulator.split_study.search import Search
from loadtest.simulator.split_study.systems import Pool, Run, System
from loadtest.workloads.trace import TraceRequest
from loadtest.workloads.trace_files import read_trace

TARGETS = {"ttft": Targets(0.4, 0.05), "balanced": Targets(1.0, 0.025), "tpot": Targets(3.0, 0.0125)}
"""By the one of the two that binds."""
LOADS = (0.4, 0.6, 0.8, 1.0, 1.2)
"""Loads, as shares of the rate up to which the best static system serves nine in ten in time."""
LONG_PROMPT = 8192
"""Mean tokens from which on a workload's TTFT targets are LONG_TTFT times as long: one such prompt takes most of the
shortest one alone."""
LONG_TTFT = 5.0
_REQUESTS = 4000
"""Requests of a named workload, before it begins again."""


class Cell(NamedTuple):
    """One comparison."""

    workload: str
    targets: str
    load: float

    @property
    def name(self) -> str:
        """Name of the cell in files and tables."""
        return f"{self.workload}, {self.targets}, {self.load:g}"


@dataclass(frozen=True, slots=True)
class Loads:
    """The requests of workloads by name."""

    traces: Mapping[str, Path]
    seconds: float
    """Least time in which requests of a run arrive."""
    seed: int = 0
    lives: float = 3.0
    """Requests arrive for at least this number of times what a mean answer takes with steps of 15 ms."""

    def requests(self, workload: str, rate: float) -> list[TraceRequest]:
        """As many as arrive in a run."""
        found = self._all(workload)
        answers_s = self.lives * sum(request.num_output_tokens for request in found) / len(found) * 0.015
        chosen = at_rate(found, rate, max(self.seconds, answers_s))
        return chosen if workload in self.traces else poisson(chosen, self.seed)

    def key(self, pool: Pool, workload: str, pair: str, rate: float) -> Key:
        """What tells such a run from others."""
        return {
            "workers": pool.name, "workload": workload, "targets": pair, "rate": float(f"{rate:.5g}"),
            "seconds": self.seconds, "lives": self.lives, "seed": self.seed,
        }  # fmt: skip

    def targets(self, cell_targets: str, workload: str) -> Targets:
        """A pair of targets for a workload."""
        found, targets = self._all(workload), TARGETS[cell_targets]
        mean = sum(request.num_prompt_tokens for request in found) / len(found)
        return Targets(targets.ttft_s * LONG_TTFT, targets.tpot_s) if mean >= LONG_PROMPT else targets

    def _all(self, workload: str) -> Sequence[TraceRequest]:
        if workload in self.traces:
            return _read(self.traces[workload])
        return WORKLOADS[workload].requests(_REQUESTS, self.seed)


class Compared(NamedTuple):
    """The outcomes of one cell's systems."""

    best: Run
    """The best static system's: of all splits of two pools, and one pool with chunks of a number of tokens."""
    by_time: Run
    """One pool with chunks by time, as mode auto has them."""
    auto: Run
    tried: list[Run]
    """All static systems that were run."""
    num_left_out: int

    @property
    def ratio(self) -> float:
        """Goodput of auto over that of the best static system."""
        return self.auto.goodput / max(self.best.goodput, 1e-9)

    @property
    def ratio_by_time(self) -> float:
        """Goodput of auto over that of one pool with chunks by time."""
        return self.auto.goodput / max(self.by_time.goodput, 1e-9)


BY_TIME = System(COLLOCATED, paced=True)


def compare(search: Search, best: System) -> Compared:
    """The best static system for this load, one pool with chunks by time, and auto."""
    auto, by_time = search.run(System(AUTO)), search.run(BY_TIME)
    return Compared(search.run(best), by_time, auto, [search.runs[s] for s in search.fixed], search.num_left_out)


@lru_cache
def _read(path: Path) -> Sequence[TraceRequest]:
    return list(read_trace(path))
