"""The clusters of a study: each started when it is first needed, and stopped in its tracks while others are measured.

A cluster without requests still takes some percent of a core, for heartbeats and timers. With several of them on two
cores that would be noise in every window, so all processes but those of the measured cluster are paused by SIGSTOP.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType

from loadtest.baseline.systems import Candidate, Hardware, make_cluster
from services.local.cluster import LocalCluster, wait_until_serving

_RESUME_S = 60.0


class Fleet:
    """Clusters by their candidates; an asynchronous context manager that stops them all."""

    def __init__(self, hardware: Hardware, folder: Path) -> None:
        self._hardware = hardware
        self._folder = folder
        self._clusters: dict[Candidate, LocalCluster] = {}

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for candidate in list(self._clusters):
            await self.stop(candidate)

    @asynccontextmanager
    async def awake(self, candidate: Candidate) -> AsyncIterator[str]:
        """The cluster's target while no other one runs. Raises what `LocalCluster.start` raises."""
        cluster = self._clusters.get(candidate)
        if cluster is None:
            print(f"starting {candidate.name}", flush=True)
            cluster = make_cluster(candidate, self._hardware, self._folder)
            await cluster.start()
            self._clusters[candidate] = cluster
        else:
            _signal(cluster, signal.SIGCONT)
        try:
            await wait_until_serving(cluster.children["router"], cluster.http, _RESUME_S)
            yield f"http://{cluster.http}"
        finally:
            _signal(cluster, signal.SIGSTOP)

    async def stop(self, candidate: Candidate) -> None:
        """Stops a cluster where it was started. Idempotent."""
        cluster = self._clusters.pop(candidate, None)
        if cluster is not None:
            _signal(cluster, signal.SIGCONT)
            await cluster.stop()

    async def keep(self, candidates: set[Candidate]) -> None:
        """Stops all others."""
        for candidate in self._clusters.keys() - candidates:
            await self.stop(candidate)


def _signal(cluster: LocalCluster, number: signal.Signals) -> None:
    for child in cluster.children.values():
        child.send_signal(number)
    if cluster.index_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(cluster.index_pid, number)
