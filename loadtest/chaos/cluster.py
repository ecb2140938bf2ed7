"""The cluster under test: two routers, two prefill and two decode workers, a KV store that is one of two store nodes,
Valkey; all under the supervisor, the workers with a failpoint."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc.aio
import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.chaos.adapters import NAMES, NUM_SLOTS
from loadtest.chaos.network import Network
from loadtest.chaos.phases import num_held, whole
from loadtest.chaos.victims import PEERS, Status, merged
from loadtest.rig.cluster import Extras, local_cluster
from services.local.cluster import LocalCluster
from services.local.supervisor import Died
from shared.failpoints import ADAPTER_READ, ENGINE_STEP
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from shared.rpc.server import channel

T = TypeVar("T")
POLL_S = 0.003
"""Pause between two looks at the cluster while a moment must not be missed."""
CALM_POLL_S = 0.05
"""Pause between two looks while parts start again: they need the processor more than we do."""
STATUS_TIMEOUT_S = 2.0
WHOLE_TIMEOUT_S = 60.0
FREE_TIMEOUT_S = 10.0
"""Blocks that are held this long after the last answer are leaked, whatever a time-out would do later."""
HANG_S = 20
READ_HANG_S = 5


class ChaosCluster:
    """One started cluster and what a trial does to it."""

    def __init__(self, cluster: LocalCluster, network: Network | None) -> None:
        self.local = cluster
        self.network = network
        """None: all parts share one network."""
        self.targets = tuple(router.grpc for router in cluster.routers)
        """The routers' gRPC addresses."""
        self._channels = [channel(target) for target in self.targets]

    async def close(self) -> None:
        """Closes its connections."""
        for opened in self._channels:
            await opened.close()

    async def statuses(self) -> list[Status | None]:
        """What each router says; None for one that does not answer."""
        return list(await asyncio.gather(*(self._status(opened) for opened in self._channels)))

    async def until(
        self, condition: Callable[[Status], bool], timeout_s: float, *, poll_s: float = CALM_POLL_S
    ) -> Status | None:
        """The first status, over all routers, with that condition; None after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = merged(await self.statuses())
            if status is not None and condition(status):
                return status
            await asyncio.sleep(poll_s)
        return None

    async def until_whole(self) -> Status | None:
        """The first status in which every part is there; None after WHOLE_TIMEOUT_S."""
        return await self.until(whole, WHOLE_TIMEOUT_S)

    async def num_leaked(self) -> int:
        """What stays held after the last answer, blocks and requests that still count; -1 where a router does not
        answer."""
        if await self.until(lambda status: num_held(status) == 0, FREE_TIMEOUT_S) is not None:
            return 0
        status = merged(await self.statuses())
        return num_held(status) if status is not None else -1

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Through the first router, to all workers. Raises AioRpcError."""
        stub = fleet_pb2_grpc.FleetServiceStub(self._channels[0])
        await stub.LoadAdapter(fleet_pb2.LoadAdapterRequest(name=name, folder=str(folder)))

    async def unload_adapter(self, name: str) -> None:
        """Lets the first router unload an adapter."""
        stub = fleet_pb2_grpc.FleetServiceStub(self._channels[0])
        await stub.UnloadAdapter(fleet_pb2.UnloadAdapterRequest(name=name))

    async def until_adapters(self, count: int) -> bool:
        """Whether every router reports this number of adapters by name at each worker, within WHOLE_TIMEOUT_S."""

        def is_so(statuses: Sequence[Status | None]) -> bool:
            workers = [worker for status in statuses if status is not None for worker in status.workers]
            return None not in statuses and all(worker.num_adapters == count for worker in workers)

        return await _within(WHOLE_TIMEOUT_S, self.statuses, is_so)

    async def until_unused(self) -> bool:
        """Whether no worker keeps an adapter for a request, within FREE_TIMEOUT_S."""
        return await _within(FREE_TIMEOUT_S, self.num_used_adapters, lambda count: count == 0)

    async def num_used_adapters(self) -> int:
        """Adapters that workers keep for requests, by their own pages; -1 where one does not come in time."""
        try:
            return await self._num_used_adapters()
        except httpx.HTTPError:
            return -1

    async def _num_used_adapters(self) -> int:
        found = 0
        async with httpx.AsyncClient(timeout=STATUS_TIMEOUT_S, verify=False) as client:
            for name, address in self.local.metrics.items():
                if name.startswith(("prefill", "decode")):
                    page = (await client.get(f"http://{address}/metrics")).text
                    found += sum(
                        int(sample.value)
                        for family in text_string_to_metric_families(page)
                        for sample in family.samples
                        if sample.name == "tandem_adapters" and sample.labels["state"] == "used"
                    )
        return found

    async def drain(self, *names: str, undo: bool = False) -> None:
        """These workers take no new requests, or take them again; returns when the routers know."""
        stub = fleet_pb2_grpc.FleetServiceStub(self._channels[0])
        request = fleet_pb2.DrainWorkersRequest(workers=names)
        await (stub.Undrain if undo else stub.Drain)(request)
        await self.until(
            lambda status: all(w.load.draining != undo for w in status.workers if w.worker.name in names),
            STATUS_TIMEOUT_S,
        )

    async def undrain_peers(self, timeout_s: float) -> None:
        """Returns when the peers take requests again, or after `timeout_s` seconds: a worker that was stopped or cut
        off gets the command once it is back, a new process is not drained."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = await self._status(self._channels[0])
            peers = [w for w in status.workers if w.worker.name in PEERS] if status is not None else []
            if peers and all(worker.connected and not worker.load.draining for worker in peers):
                return
            names = [worker.worker.name for worker in peers if worker.connected and worker.load.draining]
            if names:
                with contextlib.suppress(grpc.aio.AioRpcError):  # one that is ending, or ended meanwhile
                    await self.drain(*names, undo=True)
            await asyncio.sleep(CALM_POLL_S)

    def pid(self, part: str) -> int:
        """Process id of a part's present process."""
        return (self.local.index_pid or 0) if part == "redis" else self.local.children[part].pid

    def given_up(self) -> str:
        """The name of a part that the supervisor no longer starts; empty where there is none."""
        for change in self.local.take_changes():
            if isinstance(change, Died) and change.again_in_s is None:
                return change.name
        return ""

    async def _status(self, opened: grpc.aio.Channel) -> Status | None:
        stub = inference_pb2_grpc.InferenceServiceStub(opened)
        try:
            return await stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None


async def _within(timeout_s: float, look: Callable[[], Awaitable[T]], is_so: Callable[[T], bool]) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_so(await look()):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(CALM_POLL_S)
    return True


@contextlib.asynccontextmanager
async def chaos_cluster(
    model: Path, folder: Path, *, networked: bool = False, speculation: str = "off", adapters: Path | None = None
) -> AsyncIterator[ChaosCluster]:
    """Starts the cluster in fp32 on free ports, with logs in `folder`, and stops it. `networked`: each part in a
    network of its own. `speculation`: of its workers. `adapters`: a folder with one of each of NAMES, of which a worker
    has not all ready at once; SIGUSR1 then holds a worker's reads of adapters."""
    network = Network() if networked else None
    if network is not None:
        network.open()
    hanging = ("--failpoints", f"{ENGINE_STEP}=hang:{HANG_S}")  # SIGUSR1 hangs a worker's engine
    served: dict[str, str | int] = {}
    if adapters is not None:
        hanging = ("--failpoints", f"{ADAPTER_READ}=hang:{READ_HANG_S}")
        named = " ".join(f"{name}={adapters / name}" for name in NAMES)
        served = {"adapters": named, "adapter_folders": str(adapters), "adapter_slots": NUM_SLOTS}
    async with local_cluster(
        Extras(worker_flags=hanging),
        network,
        model=model,
        num_routers=2,
        num_prefill=2,
        num_decode=2,
        store_nodes=2,
        store_host_bytes=64 << 20,
        dtype="fp32",
        speculation=speculation,
        num_kv_blocks=1200,
        prefix_fetch="always",
        restart=True,
        state_dir=folder,
        **served,
    ) as local:
        chaos = ChaosCluster(local, network)
        try:
            yield chaos
        finally:
            await chaos.close()
