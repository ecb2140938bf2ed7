"""The compared systems, each with all of the machine's cores and the same memory for KV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadtest.rig.cluster import Extras, local_cluster
from services.local.cluster import LocalCluster
from shared.settings.common import Mode

_WORKER_NICENESS = 5


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
    return local_cluster(
        Extras(worker_flags=("--max-num-batched-tokens", str(chunk_len)), worker_niceness=_WORKER_NICENESS),
        model=model,
        num_prefill=system.num_prefill,
        num_decode=system.num_decode,
        mode=system.mode,
        num_kv_blocks=num_kv_blocks // system.num_workers,
        state_dir=out / "clusters" / f"{system.name}-chunk-{chunk_len}",
    )
