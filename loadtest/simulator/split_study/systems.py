"""What is compared: fixed splits, one pool with a fixed chunk, and mode auto; and one run of one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from loadtest.simulator.cli import PlacementOptions
from loadtest.simulator.fleet import PREFILL_CHUNK, WorkerSpec, with_chunk
from loadtest.simulator.outcome import Targets
from loadtest.simulator.simulation import AUTO, COLLOCATED, STATIC, Group, Setup, play
from loadtest.simulator.tandem_router import TandemConfig
from loadtest.workloads.trace import TraceRequest
from services.router.placement.decision import Thresholds
from shared.identity import BOTH, DECODE, PREFILL

CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)


class System(NamedTuple):
    """One way to run a fleet."""

    policy: str
    num_prefills: int = 0
    """Prefill workers of a static split."""
    chunk: int = PREFILL_CHUNK
    paced: bool = False
    """Whether chunks beside answers keep the TPOT target."""
    slow_first: bool = False
    """With two kinds of workers, whether the slow ones prefill first."""

    @property
    def name(self) -> str:
        """Name of the system in tables."""
        if self.policy == STATIC:
            return f"{self.num_prefills} prefill" + (", the slow ones first" if self.slow_first else "")
        if self.policy == COLLOCATED:
            return f"collocated, {'paced' if self.paced else f'chunks of {self.chunk}'}"
        return self.policy


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers, without their roles: the fast ones first."""

    workers: Sequence[WorkerSpec]
    seed: int = 0
    name: str = ""
    """What tells it from other pools in a file."""

    def setup(self, system: System, targets: Targets) -> Setup:
        """The fleet under a system."""
        if system.policy == STATIC:
            order = reversed(self.workers) if system.slow_first else iter(self.workers)
            groups = [
                Group(1, replace(worker, tpot_target_s=targets.tpot_s, max_num_batched_tokens=PREFILL_CHUNK), roles)
                for worker, roles in zip(
                    order,
                    [PREFILL] * system.num_prefills + [DECODE] * (len(self.workers) - system.num_prefills),
                    strict=True,
                )
            ]
        else:
            is_paced = system.paced or system.policy == AUTO
            tpot_s = targets.tpot_s if is_paced else 0.0
            roles = BOTH if system.policy == AUTO else DECODE
            workers = (replace(with_chunk(worker, system.chunk), tpot_target_s=tpot_s) for worker in self.workers)
            groups = [Group(1, worker, roles) for worker in workers]
        placement = replace(
            PlacementOptions().config,
            thresholds=Thresholds(),
            tpot_target_s=targets.tpot_s,
            ttft_target_s=targets.ttft_s,
        )
        config = TandemConfig(ttft_target_s=targets.ttft_s, placement=placement)
        return Setup(groups, targets, tandem=config, seed=self.seed)


class Run(NamedTuple):
    """What one system did with one load; rates in requests/s, over those that arrived once the fleet was warm."""

    system: str
    offered: float
    goodput: float
    refused: float
    ttft_p90_s: float
    tpot_p90_s: float
    cpu_s: float

    @property
    def share(self) -> float:
        """Share of the requests that were in time."""
        return self.goodput / self.offered


def run(
    system: System, pool: Pool, targets: Targets, requests: Sequence[TraceRequest], warm_share: float = 0.25
) -> Run:
    """Plays the requests; the first ones by `warm_share` are not counted."""
    begin = time.process_time()
    played = play(requests, 1.0, system.policy, pool.setup(system, targets))
    counted = played[int(warm_share * len(played)) :]
    span_s = max(counted[-1].at_s - counted[0].at_s, 1e-9)
    served = [request for request in counted if not request.refused]
    return Run(
        system.name,
        len(counted) / span_s,
        sum(map(targets.met_by, counted)) / span_s,
        1 - len(served) / len(counted),
        _p90([request.ttft_s for request in served]),
        _p90([request.tpot_s for request in served if request.num_output_tokens > 1]),
        time.process_time() - begin,
    )


def _p90(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.9)) if values else 0.0
