"""Clusters of real processes on this machine, started as `tandem serve` starts them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands, WorkerPlan
from services.local.places import Places
from services.local.spec import ClusterSpec
from shared.identity import WorkerRole

_FREE = "127.0.0.1:0"
_MOST_OF_A_LOG = 4000
"""Characters of each log that are printed where there is no answer."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What a measured cluster has that `tandem serve` does not offer."""

    worker_flags: Sequence[str] = ()
    """Further flags of every worker."""
    router_flags: Sequence[str] = ()
    """Further flags of every router."""
    store_flags: Sequence[str] = ()
    """Further flags of every store node."""
    worker_niceness: int = 0
    """Workers compute whenever there is work. On shared cores they would delay the router and the clients, which would
    show as latency of the system."""
    indexed: bool = True
    """Whether the router uses the index. Without it, the router places prompts by load only, with random ties."""


def local_cluster(extras: Extras, places: Places | None = None, **spec: Any) -> LocalCluster:
    """A cluster on free ports that has not been started; `spec` are fields of ClusterSpec. Raises what that raises."""
    made = ClusterSpec(http=_FREE, grpc=_FREE, **spec)
    return LocalCluster(made, commands=_Commands(made, extras), places=places)


def print_logs(cluster: LocalCluster) -> None:
    """The ends of its processes' logs, which go with the cluster's folder."""
    for log in sorted(cluster.spec.log_dir.glob("*.log")):
        print(f"== {log.name}", log.read_text(errors="replace")[-_MOST_OF_A_LOG:], sep="\n", flush=True)


class _Commands(TandemCommands):
    """The real services with the extras."""

    def __init__(self, spec: ClusterSpec, extras: Extras) -> None:
        super().__init__(spec)
        self._extras = extras

    def worker(self, plan: WorkerPlan, kvstore: str) -> Sequence[str]:
        """See ServiceCommands."""
        nice = shutil.which("nice") if self._extras.worker_niceness else None
        give_way = [] if nice is None else [nice, "-n", str(self._extras.worker_niceness)]
        return [*give_way, *super().worker(plan, kvstore), *self._extras.worker_flags]

    def store_node(self, number: int, bind: str, redis_url: str) -> Sequence[str]:
        """See ServiceCommands."""
        return [*super().store_node(number, bind, redis_url), *self._extras.store_flags]

    def router(
        self, workers: Mapping[WorkerRole, Mapping[str, str]], kvstore: str, stores: str = "", number: int = 0
    ) -> Sequence[str]:
        """See ServiceCommands."""
        command = super().router(workers, kvstore if self._extras.indexed else "", stores, number)
        return [*command, *self._extras.router_flags]
