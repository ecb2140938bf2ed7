"""The compared systems: the same number of workers on the same cores, used in different ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.rig.cluster import Extras, local_cluster
from loadtest.slo import Slo
from services.local.cluster import LocalCluster
from shared.settings.common import Mode

_WORKER_NICENESS = 5


@dataclass(frozen=True, slots=True)
class System:
    """One way to use the workers."""

    name: str
    """Without spaces, as the results have it."""
    mode: Mode
    num_prefill: int
    num_decode: int
    worker_flags: tuple[str, ...] = ()
    """Further flags of its workers."""

    @property
    def num_workers(self) -> int:
        """Number of workers; they share the cores evenly."""
        return self.num_prefill + self.num_decode


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system with its settings: what one cluster is started with."""

    system: System
    chunk_len: int | None = None
    """Chunk budget, tokens a step; None: the workers' own."""
    slo: Slo | None = None
    """Targets that the router and its workers know; None: they have none."""
    refused_by_s: float | None = None
    """Time to the first token beyond which the router refuses a request; None: it refuses none."""

    @property
    def name(self) -> str:
        """Name of the system in folders and logs."""
        parts = [self.system.name, *([] if self.chunk_len is None else [f"chunk-{self.chunk_len}"])]
        slo = self.slo
        if slo is not None:
            parts.append(f"ttft-{1e3 * (slo.ttft_s or 0):g}-tpot-{1e3 * (slo.tpot_s or 0):g}")
        if self.refused_by_s is not None:
            parts.append(f"within-{1e3 * self.refused_by_s:g}")
        return "-".join(parts)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What all systems run on."""

    model: Path
    device: str
    num_kv_blocks: int
    """Blocks of each worker's pool."""


def disaggregated(num_prefill: int, num_workers: int) -> System:
    """Workers with one role each."""
    num_decode = num_workers - num_prefill
    return System(f"{num_prefill}P+{num_decode}D", "disaggregated", num_prefill, num_decode)


def collocated(num_workers: int) -> System:
    """Workers that each serve whole requests."""
    return System(f"{num_workers}-collocated", "collocated", 0, num_workers)


def adaptive(num_workers: int) -> System:
    """Workers with both roles, of which the router chooses one or two for each request."""
    num_prefill = num_workers // 2
    return System("auto", "auto", num_prefill, num_workers - num_prefill)


def speculating(num_workers: int, setting: str) -> System:
    """Workers that each serve whole requests, and guess."""
    return System(f"speculation-{setting}", "collocated", 0, num_workers, ("--speculation", setting))


def default_splits(num_workers: int) -> Sequence[int]:
    """Prefill workers of the fixed splits: a quarter, half and three quarters of all, at least one."""
    return sorted({min(max(1, round(num_workers * share)), num_workers - 1) for share in (0.25, 0.5, 0.75)})


def make_cluster(candidate: Candidate, hardware: Hardware, folder: Path) -> LocalCluster:
    """A cluster that has not been started, on free ports, with its logs under `folder`."""
    system, slo = candidate.system, candidate.slo
    chunk = () if candidate.chunk_len is None else ("--max-num-batched-tokens", str(candidate.chunk_len))
    targets = [] if slo is None else [("targets.ttft", slo.ttft_s), ("targets.tpot", slo.tpot_s)]
    targets.append(("admission.ttft-target", candidate.refused_by_s))
    return local_cluster(
        Extras(
            worker_flags=(*chunk, *system.worker_flags),
            router_flags=[f"--{name}-s={value:g}" for name, value in targets if value is not None],
            worker_niceness=_WORKER_NICENESS,
        ),
        model=hardware.model,
        device=hardware.device,
        num_prefill=system.num_prefill,
        num_decode=system.num_decode,
        mode=system.mode,
        num_kv_blocks=hardware.num_kv_blocks,
        state_dir=folder / candidate.name,
    )
