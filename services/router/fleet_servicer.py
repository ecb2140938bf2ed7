"""`tandem.v1.FleetService`, which `tandem drain`, `tandem undrain` and `tandem record` call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from services.router.edge.grpc.unary_call import answer_admin, stream_admin
from services.router.edge.model_names import ModelNames
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.recording import recorded
from services.router.views.recorder import Recorder
from services.router.views.status import worker_status
from services.router.workers.fleet import Fleet
from services.router.workers.link import WorkerLink
from shared.errors import DeadlineExceeded, InvalidRequest, NotFound, TandemError
from shared.fingerprints import system_fingerprint
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.FleetService"
TIMEOUT_S = 10.0
"""Time for the workers to report the new drain state, seconds."""
_POLL_S = 0.02

Context = grpc.aio.ServicerContext[Any, Any]


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """Drains workers for an administrator and takes that back, loads adapters, changes weights, records requests. Every
    call needs an admin API key."""

    def __init__(
        self,
        fleets: Sequence[Fleet],
        settings: EdgeSettings,
        names: Sequence[ModelNames] = (),
        recorders: Sequence[Recorder] = (),
    ) -> None:
        """`fleets`: each model's workers, names unique over all of them. Does not close them. `names` and `recorders`:
        of each model."""
        self._fleets = fleets
        self._names = names
        self._recorders = recorders
        self._keys = ApiKeys.of(settings)

    def register(self, server: grpc.aio.Server) -> None:
        """The `register` of `RpcServer`."""
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self, server)

    async def Drain(  # noqa: N802
        self, request: fleet_pb2.DrainWorkersRequest, context: Context
    ) -> fleet_pb2.DrainedWorkers:
        """The workers take no new requests; returns once they report that."""
        return await answer_admin(self._keys, lambda asked: self._set(asked, draining=True), request, context)

    async def Undrain(  # noqa: N802
        self, request: fleet_pb2.DrainWorkersRequest, context: Context
    ) -> fleet_pb2.DrainedWorkers:
        """The workers take requests again; returns once they report that."""
        return await answer_admin(self._keys, lambda asked: self._set(asked, draining=False), request, context)

    async def LoadAdapter(  # noqa: N802
        self, request: fleet_pb2.LoadAdapterRequest, context: Context
    ) -> fleet_pb2.LoadedAdapter:
        """Every connected worker of the model has the adapter, and then it has the name."""
        return await answer_admin(self._keys, self._load_adapter, request, context)

    async def UnloadAdapter(  # noqa: N802
        self, request: fleet_pb2.UnloadAdapterRequest, context: Context
    ) -> fleet_pb2.UnloadedAdapter:
        """The name is unknown from then on."""
        return await answer_admin(self._keys, self._unload_adapter, request, context)

    async def UpdateWeights(  # noqa: N802
        self, request: fleet_pb2.UpdateWeightsRequest, context: Context
    ) -> fleet_pb2.UpdatedWeights:
        """Every worker of the model has other weights."""
        return await answer_admin(self._keys, self._update_weights, request, context)

    async def Sleep(self, request: fleet_pb2.SleepRequest, context: Context) -> fleet_pb2.DrainedWorkers:  # noqa: N802
        """The workers have freed their weights."""
        return await answer_admin(self._keys, self._sleep, request, context)

    async def WakeUp(self, request: fleet_pb2.WakeUpRequest, context: Context) -> fleet_pb2.DrainedWorkers:  # noqa: N802
        """The workers take requests again."""
        return await answer_admin(self._keys, self._wake, request, context)

    async def Record(  # noqa: N802
        self, request_iterator: AsyncIterator[fleet_pb2.RecordRequest], context: Context
    ) -> AsyncIterator[fleet_pb2.RecordedRequests]:
        """A model's requests as they end."""
        async for message in stream_admin(
            self._keys, lambda asked: recorded(self._recorder, asked), request_iterator, context
        ):
            yield message

    def _recorder(self, model: str) -> Recorder:
        return self._recorders[self._names.index(self._model(model))]

    async def _update_weights(self, request: fleet_pb2.UpdateWeightsRequest) -> fleet_pb2.UpdatedWeights:
        weights = self._model(request.model).known_weights
        fingerprint, workers = await weights.update(request.folder, request.timeout_s)
        return fleet_pb2.UpdatedWeights(
            system_fingerprint=system_fingerprint(fingerprint), model_fingerprint=fingerprint, workers=workers
        )

    async def _sleep(self, request: fleet_pb2.SleepRequest) -> fleet_pb2.DrainedWorkers:
        return self._statuses(await self._model(request.model).known_weights.sleep(request.workers, request.timeout_s))

    async def _wake(self, request: fleet_pb2.WakeUpRequest) -> fleet_pb2.DrainedWorkers:
        return self._statuses(await self._model(request.model).known_weights.wake(request.workers))

    def _statuses(self, names: Sequence[str]) -> fleet_pb2.DrainedWorkers:
        links = {link.name: link for fleet in self._fleets for link in fleet.links}
        return fleet_pb2.DrainedWorkers(workers=[worker_status(links[name]) for name in names if name in links])

    async def _load_adapter(self, request: fleet_pb2.LoadAdapterRequest) -> fleet_pb2.LoadedAdapter:
        adapter, workers = await self._model(request.model).load(request.name, request.folder)
        found = types_pb2.Adapter(
            name=adapter.name, digest=adapter.digest, rank=adapter.rank, num_bytes=adapter.num_bytes
        )
        return fleet_pb2.LoadedAdapter(adapter=found, workers=workers)

    async def _unload_adapter(self, request: fleet_pb2.UnloadAdapterRequest) -> fleet_pb2.UnloadedAdapter:
        workers = await self._model(request.model).unload(request.name)
        return fleet_pb2.UnloadedAdapter(workers=workers)

    def _model(self, name: str) -> ModelNames:
        found = next((names for names in self._names if not name or names.include(name)), None)
        if found is None:
            raise NotFound(f"there is no model {name!r}", field="model", value=name)
        return found

    async def _set(self, request: fleet_pb2.DrainWorkersRequest, *, draining: bool) -> fleet_pb2.DrainedWorkers:
        links = self._named(list(request.workers))
        for link in links:
            link.calls.drain(undo=not draining)
            logger.info("worker %s is asked to %s", link.name, "drain" if draining else "take requests again")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not all(link.load.draining == draining for link in links):  # noqa: ASYNC110 - asked by hand
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise _unmoved(links, draining=draining) from None
        return fleet_pb2.DrainedWorkers(workers=[worker_status(link) for link in links])

    def _named(self, names: list[str]) -> list[WorkerLink]:
        """The links of these workers, all connected. Raises before any command is sent."""
        if not names:
            raise InvalidRequest("workers must name at least one worker", field="workers", limit=1)
        links = {link.name: link for fleet in self._fleets for link in fleet.links}
        unknown = [name for name in names if name not in links]
        if unknown:
            raise NotFound(f"there is no worker {unknown[0]!r}", field="workers", value=unknown[0])
        lost = [name for name in names if not links[name].connected]
        if lost:
            raise InvalidRequest(f"worker {lost[0]} is not connected", field="workers", value=lost[0])
        return [links[name] for name in dict.fromkeys(names)]


def _unmoved(links: list[WorkerLink], *, draining: bool) -> TandemError:
    names = ", ".join(link.name for link in links if link.load.draining != draining)
    does = "takes requests still" if draining else "is still draining, as a process that ends is"
    return DeadlineExceeded(f"worker {names} {does}, {TIMEOUT_S:g} s after it was asked", limit=TIMEOUT_S)
