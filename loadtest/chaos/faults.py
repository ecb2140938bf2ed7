"""What happens to a process, or between processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from loadtest.chaos.cluster import HANG_S, ChaosCluster
from loadtest.chaos.trial import LASTING_CUT, PARTITIONS, Trial
from loadtest.chaos.victims import Status, cut_pairs, one_pair, parts_of
from services.local.supervisor import MAX_DEATHS, WINDOW_S

PARTITION_S = 10.0
"""Longer than a router waits before it gives a worker up, and a worker a router."""
DEADLY = ("SIGKILL", "drain")


async def strike(trial: Trial, cluster: ChaosCluster, status: Status) -> None:
    """Lets the fault happen, to the parts that `status` shows as the victim's; returns at its end where it has one."""
    if trial.fault == LASTING_CUT:
        assert cluster.network is not None, "as for partitions"
        cluster.network.cut([one_pair(trial.victim, status)], both_ways=True)
        return
    if trial.fault in PARTITIONS:
        await _partition(trial, cluster, status)
        return
    pids = [cluster.pid(part) for part in parts_of(trial.victim, status)]
    if trial.fault == "SIGKILL":
        _signal(pids, signal.SIGKILL)
    elif trial.fault == "drain":
        _signal(pids, signal.SIGTERM)
    elif trial.fault == "hung-engine":
        _signal(pids, signal.SIGUSR1)
        await asyncio.sleep(HANG_S)
    else:
        _signal(pids, signal.SIGSTOP)
        try:
            await asyncio.sleep(float(trial.fault.removeprefix("SIGSTOP-").removesuffix("s")))
        finally:
            _signal(pids, signal.SIGCONT)


async def _partition(trial: Trial, cluster: ChaosCluster, status: Status) -> None:
    assert cluster.network is not None, "partitions are tried where each part has a network of its own"
    cluster.network.cut(cut_pairs(trial.victim, status), both_ways=trial.fault == "two-way-partition")
    try:
        await asyncio.sleep(PARTITION_S)
    finally:
        cluster.network.heal()


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, number)


_MARGIN_S = 5.0
"""A part dies a moment after it was told to."""


class Deaths:
    """Of one cluster's parts."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)

    def note(self, parts: Iterable[str]) -> None:
        """These die now."""
        for part in parts:
            self._times[part].append(time.monotonic())

    async def wait(self, parts: Iterable[str]) -> None:
        """Until one more death of any of these would not be its last."""
        for part in parts:
            times = self._times[part]
            if len(times) >= MAX_DEATHS - 1:
                oldest = times[1 - MAX_DEATHS]
                await asyncio.sleep(max(0.0, oldest + WINDOW_S + _MARGIN_S - time.monotonic()))
