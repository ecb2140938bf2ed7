"""A worker process from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping

import grpc.aio

from services.worker.adapters.start import start_adapters
from services.worker.blocks.connector import KVConnector
from services.worker.group.meeting.member import Member, start_member
from services.worker.host import EngineHost
from services.worker.session import SessionServer
from services.worker.settings import WorkerSettings
from services.worker.telemetry.gpu_use import GpuUse
from services.worker.telemetry.metrics import METRICS, WorkerSources
from services.worker.telemetry.vllm_names import VLLM
from services.worker.weights.fetch import fetch_missing_folder
from services.worker.weights.server import SERVICE_NAME as WEIGHT_SERVICE_NAME
from services.worker.weights.server import WeightServicer, weights_key
from services.worker.worker import RoleMakers, Worker
from shared.address import Address, parse_named
from shared.block_service.servicer import SERVICE_NAME as BLOCK_SERVICE_NAME
from shared.block_service.servicer import BlockServicer
from shared.identity import Roles, WorkerIdentity, holder_role, roles_text
from shared.kv.fleet_key import token_of
from shared.kv_index.client import KVStoreClient
from shared.kv_index.publisher import IndexPublisher
from shared.process import progress_event, run_service
from shared.rpc.fleet_identity import FleetGuard
from shared.rpc.pb.tandem.v1 import kvstore_pb2_grpc
from shared.rpc.protocol import SESSION_SERVICE
from shared.rpc.server import RpcServer
from shared.telemetry.metrics import Metrics
from shared.telemetry.metrics_server import MetricsServer
from shared.telemetry.tracing.tracer import Tracer

logger = logging.getLogger(__name__)


class WorkerService:
    """Implements `shared.process.Service`."""

    def __init__(
        self,
        host: EngineHost,
        worker: Worker,
        store: KVStoreClient | None,
        publisher: IndexPublisher | None,
        connector: KVConnector,
        guard: FleetGuard,
        tracer: Tracer | None = None,
    ) -> None:
        """Owns all of them but the guard."""
        self._tracer = tracer
        self._connector = connector
        self._host = host
        self._store = store
        self._worker = worker
        self._publisher = publisher
        self._watch: asyncio.Task[None] | None = None
        self._guard = guard
        settings = host.settings
        self._metrics = Metrics(service_name(worker.roles), settings.name)
        sources = WorkerSources(
            worker.load,
            host.engine.steps,
            host.transfer.counters,
            worker.shipments,
            lambda: host.model.loaded.expert_tokens() if host.model.loaded is not None else (),
            host.model.layout,
            lambda: host.guesses,
            GpuUse.of(settings.devices),
            worker.adapters,
        )
        self._metrics.observe(METRICS, sources)
        if settings.vllm_metrics:
            self._metrics.observe(VLLM, sources, {"model_name": host.model.name, "engine": "0"})
        if tracer is not None:
            tracer.observe(self._metrics)
        self._metrics_server = MetricsServer(settings.metrics, self._metrics.registry, self._not_ready_reason)
        self.server: RpcServer

    @property
    def address(self) -> str:
        """host:port of the session server."""
        return self.server.address

    @property
    def endpoints(self) -> Mapping[str, str]:
        """The metrics page's, where there is one."""
        return {"metrics": self._metrics_server.address} if self._metrics_server.address else {}

    async def serve(self, sessions: SessionServer) -> None:
        """Opens the metrics page and the session server. Raises ConfigError where a port is taken."""

        def register(server: grpc.aio.Server) -> None:
            sessions.register(server)
            kvstore_pb2_grpc.add_BlockServiceServicer_to_server(
                BlockServicer(self._connector.server, self._guard, self._tracer), server
            )
            weights.register(server)

        settings = self._host.settings
        weights = WeightServicer(lambda: self._host.folder, self._guard, await weights_key(settings))
        self.server = RpcServer(
            settings.bind,
            register,
            (SESSION_SERVICE, BLOCK_SERVICE_NAME, WEIGHT_SERVICE_NAME),
            credentials=settings.tls.server_credentials(),
        )
        await self._metrics_server.start()
        self._metrics.watch_loop()
        await self.server.start()
        await self.server.set_serving(True)
        self._watch = asyncio.create_task(self._end_with_engine())

    async def close(self) -> None:
        """Drains: no new work, what runs is finished within the drain timeout, then everything is closed."""
        self._worker.drain(for_good=True)
        await self.server.set_serving(False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._worker.idle.wait(), self._host.settings.drain_timeout_s)
        await self.server.stop(grace_s=0.2)
        if self._watch is not None:
            self._watch.cancel()
        self._worker.load.close()
        await self._connector.close()
        if self._worker.adapters is not None:
            await self._worker.adapters.close()
        if self._publisher is not None:
            await self._publisher.close()
        if self._store is not None:
            await self._store.close()
        await self._host.close()
        if self._tracer is not None:
            await self._tracer.close()
        self._metrics_server.close()
        self._metrics.close()

    def _not_ready_reason(self) -> str:
        if self.server.serving:
            return ""
        return "draining" if self._worker.load.draining else "starting"

    async def _end_with_engine(self) -> None:
        """Ends the process at once when its engine has died: routers see their sessions break."""
        await self._worker.died.wait()
        logging.shutdown()
        os._exit(1)


def service_name(roles: Roles) -> str:
    """The name in logs, metrics and traces: tandem-prefill, tandem-decode, or tandem-worker for both."""
    return "tandem-worker" if len(roles) > 1 else f"tandem-{roles_text(roles)}"


def run_worker(makers: RoleMakers) -> int:
    """Runs a worker process with these roles until it is stopped; returns its exit status."""
    name = service_name(frozenset(makers))
    return run_service(name, WorkerSettings, lambda settings: start_worker(settings, makers))


async def start_worker(settings: WorkerSettings, makers: RoleMakers) -> WorkerService | Member:
    """Loads the model, serves sessions in the roles that `makers` make; on a further host of a group, starts its ranks.
    Raises ConfigError, ModelLoadError, as a member RankLost and Unauthenticated too."""
    settings.tls.check("tls", mutual=True)
    await fetch_missing_folder(settings, progress_event)
    if settings.group_host_index:
        return await start_member(settings)
    stores = parse_named(settings.store, "store", unnamed=True)
    index_address = str(Address.parse(settings.kvstore, "kvstore", min_port=1)) if settings.kvstore else ""
    credentials = settings.tls.channel_credentials()
    roles: Roles = frozenset(makers)
    host = EngineHost(settings.for_roles(roles), roles)
    await host.start(progress_event)
    try:
        adapters = await start_adapters(host)
    except BaseException:
        await host.close()
        raise
    store, publisher = None, None
    if index_address:
        store = KVStoreClient(index_address, credentials=credentials)
        identity = WorkerIdentity(settings.name, host.incarnation, holder_role(roles))
        publisher = IndexPublisher(store, identity)
        await publisher.start()
    # A store node keeps blocks of one size, those that prompts are computed from: who decodes alone fetches none.
    connector = KVConnector(host, {} if host.model.layout.format.source else stores, credentials)
    connector.start()
    tracer = Tracer.of(settings.traces, service_name(roles), settings.name)
    if tracer is not None:
        tracer.start()
    worker = Worker(host, publisher, connector, makers, tracer, adapters)
    host.listen(worker.on_event)
    guard = FleetGuard(token_of(host.fleet_key))
    service = WorkerService(host, worker, store, publisher, connector, guard, tracer)
    await service.serve(SessionServer(worker, guard))
    model = host.model
    logger.info(
        "%s serves %s on %s: %s, kernels %s, %d blocks of %d bytes, sequences up to %d tokens",
        settings.name,
        model.name,
        service.address,
        model.layout.name,
        model.kernels,
        model.num_blocks,
        model.layout.block_bytes,
        model.max_model_len,
    )
    return service
