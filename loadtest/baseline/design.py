"""What a study is to measure: workloads, systems, loads and rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.baseline.calibration import BUSY_S
from loadtest.baseline.systems import Candidate, System
from loadtest.baseline.workloads import WindowSize
from loadtest.slo import Slo

TIME = "time"
"""In place of a chunk budget: chunks as large as the router's target for TPOT allows."""
AGAIN = "-again"
"""Ends the name of a system's second turn in a round."""


@dataclass(frozen=True, slots=True)
class Design:
    """What a study is to measure."""

    workloads: Mapping[str, str]
    """Specs by name."""
    loads: Sequence[float]
    """Shares of the capacity."""
    collocated: System
    splits: Sequence[System]
    """The other fixed systems."""
    adaptive: System | None
    """Compared with the best fixed one; it knows the targets. Or the system whose workers guess, likewise."""
    chunks: Sequence[str]
    """Budgets to try for every fixed system, or TIME."""
    rounds: int
    size: WindowSize
    slo: Slo | None
    """None: calibrated, for each workload."""
    seed: int
    vocab_size: int
    commit: str
    traces: Path | None = None
    warm_up: int = 0
    """Requests of each system before its first round in a process: routers and workers learn from the first some
    hundred, and calibration is with one system alone."""
    busy_s: float = BUSY_S
    """How long the collocated system is kept busy, to know where its capacity can be."""

    @property
    def fixed(self) -> tuple[System, ...]:
        """The systems that decide nothing."""
        return (self.collocated, *self.splits)

    @property
    def turns(self) -> dict[str, System]:
        """The systems of a round by the names of their turns. The collocated one has two, as far apart as can be."""
        adaptive = [] if self.adaptive is None else [self.adaptive]
        named = {system.name: system for system in (self.collocated, *adaptive, *self.splits)}
        return {**named, self.collocated.name + AGAIN: self.collocated}

    @property
    def calibrated(self) -> Candidate:
        """What targets and the busy rate are measured with: it refuses nothing, and serves every workload alike."""
        chunks = [chunk for chunk in self.chunks if chunk != TIME]
        return Candidate(self.collocated, int(chunks[-1]) if chunks else None)

    def candidate(self, system: System, slo: Slo, chunks: Mapping[str, str]) -> Candidate:
        """A system that knows the targets, with its chunk budget by name; the adaptive one bounds chunks by time."""
        return with_chunk(system, TIME if system == self.adaptive else chunks[system.name], slo)


def with_chunk(system: System, chunk: str, slo: Slo) -> Candidate:
    """A system with a chunk budget, tokens or TIME, that refuses what would miss its target for TTFT."""
    if chunk == TIME:
        return Candidate(system, slo=slo, refused_by_s=slo.ttft_s)
    return Candidate(system, int(chunk), refused_by_s=slo.ttft_s)


def in_order(turns: Sequence[str], number: int) -> Sequence[str]:
    """A round's turns: A B C, then C B A, so that a drift that is even over two rounds favours none."""
    return turns if number % 2 == 0 else turns[::-1]
