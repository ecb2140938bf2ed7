"""The cluster under test: two prefill and two decode workers, a KV store that is one of two store nodes, Valkey, a
router; all under the supervisor, the workers with a failpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc.aio

from loadtest.chaos.trial import WORKERS
from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands, WorkerPlan
from services.local.spec import ClusterSpec
from services.local.supervisor import Died
from shared.failpoints import ENGINE_STEP
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from shared.rpc.server import channel

POLL_S = 0.003
STATUS_TIMEOUT_S = 2.0
HANG_S = 20

Status = inference_pb2.ClusterStatus


class _Commands(TandemCommands):
    """The real services; SIGUSR1 hangs a worker's engine."""

    def worker(self, plan: WorkerPlan, kvstore: str) -> Sequence[str]:
        """See ServiceCommands."""
        return [*super().worker(plan, kvstore), "--failpoints", f"{ENGINE_STEP}=hang:{HANG_S}"]


class ChaosCluster:
    """One started cluster and what a trial does to it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.local = cluster
        self._channel = channel(cluster.grpc)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def close(self) -> None:
        """Closes its connection."""
        await self._channel.close()

    async def status(self) -> Status | None:
        """What the router says; None while it does not answer."""
        try:
            return await self._stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None

    async def until(self, condition: Callable[[Status], bool], timeout_s: float) -> Status | None:
        """The first status with that condition; None after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = await self.status()
            if status is not None and condition(status):
                return status
            await asyncio.sleep(POLL_S)
        return None

    def pid(self, victim: str, status: Status) -> int:
        """Of the part that plays the victim: of several workers the one with the most requests."""
        if victim == "redis":
            return self.local.index_pid or 0
        if victim in WORKERS:
            pool = [worker for worker in status.workers if worker.worker.name.startswith(victim)]
            busiest = max(pool, key=lambda worker: worker.num_requests)
            return self.local.children[busiest.worker.name].pid
        return self.local.children["store-1" if victim == "store" else victim].pid

    def given_up(self) -> str:
        """The name of a part that the supervisor no longer starts; empty where there is none."""
        for change in self.local.take_changes():
            if isinstance(change, Died) and change.again_in_s is None:
                return change.name
        return ""


async def strike(fault: str, pid: int) -> None:
    """Lets the fault happen to a process; returns at its end where it has one."""
    if fault == "SIGKILL":
        os.kill(pid, signal.SIGKILL)
    elif fault == "drain":
        os.kill(pid, signal.SIGTERM)
    elif fault == "hung-engine":
        os.kill(pid, signal.SIGUSR1)
        await asyncio.sleep(HANG_S)
    else:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(float(fault.removeprefix("SIGSTOP-").removesuffix("s")))
        finally:
            with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
                os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def chaos_cluster(model: Path, folder: Path) -> AsyncIterator[ChaosCluster]:
    """Starts the cluster in fp32 on free ports, with logs in `folder`, and stops it."""
    spec = ClusterSpec(
        model=model,
        num_prefill=2,
        num_decode=2,
        store_nodes=2,
        store_host_bytes=64 << 20,
        dtype="fp32",
        num_kv_blocks=1200,
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        restart=True,
        state_dir=folder,
    )
    async with LocalCluster(spec, commands=_Commands(spec)) as local:
        chaos = ChaosCluster(local)
        try:
            yield chaos
        finally:
            await chaos.close()
