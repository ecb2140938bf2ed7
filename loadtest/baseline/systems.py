"""The compared systems, each with all of the machine's cores and the same memory for KV."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands, WorkerPlan
from services.local.spec import ClusterSpec
from shared.settings.common import Mode

_WORKER_NICENESS = "5"
"""Niceness of the workers, which compute whenever there is work. On shared cores they would delay the router and the
load generator, which would show as latency of the system."""


@dataclass(frozen=True, slots=True)
class System:
    """One way to use the cores."""

    name: str
    title: str
    mode: Mode
    num_prefill: int
    num_decode: int

    @property
    def num_workers(self) -> int:
        """Number of workers; they share cores and blocks evenly."""
        return self.num_prefill + self.num_decode


SYSTEMS = (
    System("disaggregated", "1 prefill + 1 decode", "disaggregated", 1, 1),
    System("collocated-2", "2 collocated", "collocated", 0, 2),
    System("collocated-1", "1 collocated, all cores", "collocated", 0, 1),
)


def make_cluster(system: System, model: Path, chunk_len: int, num_kv_blocks: int, out: Path) -> LocalCluster:
    """A cluster that has not been started, on free ports, with its logs under `out`; `num_kv_blocks` counts those of
    all workers together."""
    spec = ClusterSpec(
        model=model,
        num_prefill=system.num_prefill,
        num_decode=system.num_decode,
        mode=system.mode,
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        num_kv_blocks=num_kv_blocks // system.num_workers,
        state_dir=out / "clusters" / f"{system.name}-chunk-{chunk_len}",
    )
    return LocalCluster(spec, commands=_Commands(spec, chunk_len))


class _Commands(TandemCommands):
    """The real services with a chunk budget and with low-priority workers."""

    def __init__(self, spec: ClusterSpec, chunk_len: int) -> None:
        super().__init__(spec)
        self._chunk_len = chunk_len

    def worker(self, plan: WorkerPlan, kvstore: str) -> Sequence[str]:
        """See ServiceCommands."""
        budget = ("--max-num-batched-tokens", str(self._chunk_len))
        nice = shutil.which("nice")
        give_way = [] if nice is None else [nice, "-n", _WORKER_NICENESS]
        return [*give_way, *super().worker(plan, kvstore), *budget]
