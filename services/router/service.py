"""One router replica: what it is made of, and its start."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING

import grpc.aio

from services.router.cache.servicer import SERVICE_NAME as CACHE_SERVICE_NAME
from services.router.cache.servicer import CachedModel, CacheServicer
from services.router.cache.watch import CacheWatch
from services.router.edge.access import CALLS, Access
from services.router.edge.catalog import Catalog
from services.router.edge.grpc.model_servicer import ModelServicer
from services.router.edge.grpc.servicer import SERVICE_NAME as INFERENCE_SERVICE_NAME
from services.router.edge.grpc.servicer import InferenceServicer, server_options
from services.router.edge.http.app import PATHS, Kept, build_models_app
from services.router.edge.http.server.http_server import HttpServer
from services.router.edge.scheduling import SchedulingHints
from services.router.edge.tenants.rate_limits import RateLimits
from services.router.fleet_servicer import SERVICE_NAME as FLEET_SERVICE_NAME
from services.router.fleet_servicer import FleetServicer
from services.router.served_model import ServedModel, Surroundings
from services.router.settings import RouterSettings
from services.router.status.observer import Observer
from services.router.views.explanation import explanation, request_info
from services.router.views.traces.call_trace import CallTraces
from shared.address import Address
from shared.block_service.store_nodes import StoreNodes
from shared.errors import TandemError
from shared.kv.fleet_key import FleetKey, token_of
from shared.kv_index.client import KVStoreClient
from shared.records.client import KVStoreRecords
from shared.rpc.pb.tandem.v1 import inference_pb2
from shared.rpc.server import RpcServer
from shared.telemetry.joined_page import joined_page
from shared.telemetry.tracing.tracer import Tracer

if TYPE_CHECKING:
    from services.router.picker.server import PickerServer

logger = logging.getLogger(__name__)


class RouterService:
    """Implements `shared.process.HurriedService`."""

    def __init__(self, settings: RouterSettings) -> None:
        """Reads tokenizers and templates and composes the parts; raises ConfigError, ModelLoadError."""
        self._settings = settings
        settings.tls.check("tls", mutual=True)
        settings.edge.tls.check("edge.tls", mutual=False)
        self._credentials = settings.tls.channel_credentials()
        self._token = token_of(FleetKey.of(settings.fleet_key.get_secret_value()))
        self._store = self._new_store_client()
        self._stores = StoreNodes(settings.store_addresses(), self._credentials, self._token)
        self._watch = CacheWatch(self._store, self._stores)
        self._tracer = Tracer.of(settings.traces, "tandem-router", settings.name)
        self._models = self._new_models()
        self._access = Access(settings.edge.access_log, PATHS)
        self._models[0].metrics.metrics.observe(CALLS, self._access, common={})
        self._observer = Observer(self._models, lambda: self._watch.failures)
        catalog = Catalog([model.edge for model in self._models])
        self.grpc = self._new_grpc_server(catalog)
        self.picker = self._new_picker()
        self._records = KVStoreRecords(settings.kvstore, self._credentials) if settings.kvstore else None
        self._kept = Kept.of(settings.edge, catalog, self._records)
        self._app = build_models_app(
            catalog, settings.edge, self._metrics_page, self._observer, self._access, self._kept
        )
        self.http = HttpServer(
            settings.http, self._app, settings.edge.limits, settings.edge.tls, self._access.http_refused
        )

    def _new_store_client(self) -> KVStoreClient | None:
        if not self._settings.kvstore:
            return None
        address = Address.parse(self._settings.kvstore, "kvstore", min_port=1)
        return KVStoreClient(str(address), credentials=self._credentials)

    def _new_models(self) -> tuple[ServedModel, ...]:
        every = self._settings.each_model()
        traces = CallTraces(self._tracer, self._settings.traces, self._keep_trace)
        around = Surroundings(self._store, RateLimits(self._settings.edge), self._credentials, self._token, traces)
        names = [each.model_name for each in every]
        models = tuple(
            ServedModel(each, tuple(name for name in names if name != each.model_name), around) for each in every
        )
        if self._tracer is not None:
            self._tracer.observe(models[0].metrics.metrics)
        for model in models[1:]:
            model.metrics.tenants = models[0].metrics.tenants  # a tenant's sums are over all models
        return models

    def _keep_trace(self, workers: frozenset[str], trace_id: bytes) -> None:
        """See `KeepTrace`."""
        for model in self._models:
            model.fleet.keep_trace(workers, trace_id)
        if self._store is not None:
            self._store.keep_trace(trace_id)

    def _new_grpc_server(self, catalog: Catalog) -> RpcServer:
        """The server of all gRPC services, those of operators included."""
        edge = self._settings.edge
        servicers = {
            model.name: InferenceServicer(
                model.edge,
                catalog,
                edge,
                self._observer.status,
                self._explain,
                self._request_info,
                self._settings.name,
                self._access,
            )
            for model in self._models
        }
        inference = ModelServicer(lambda name: servicers[catalog.find(name).model_name])
        cache = CacheServicer(
            [
                CachedModel(model.edge.names, model.fleet, model.reader, tuple(model.settings.store_addresses()))
                for model in self._models
            ],
            self._store,
            self._stores,
            self._models[0].metrics.tenants,
            edge,
            self._credentials,
            self._token,
        )
        fleet = FleetServicer(
            [model.fleet for model in self._models],
            edge,
            [model.edge.names for model in self._models],
            [model.requests.recorder for model in self._models],
        )

        def register(server: grpc.aio.Server) -> None:
            for servicer in (inference, cache, fleet):
                servicer.register(server)

        return RpcServer(
            self._settings.grpc,
            register,
            (INFERENCE_SERVICE_NAME, CACHE_SERVICE_NAME, FLEET_SERVICE_NAME),
            options=server_options(edge.limits),
            max_calls=edge.limits.max_grpc_calls,
            credentials=edge.tls.server_credentials(),
        )

    def _new_picker(self) -> PickerServer | None:
        settings = self._settings
        if not settings.picker.bind:
            return None
        from services.router.picker.server import PickerServer  # Envoy's messages are many modules

        count = self._models[0].metrics.picked
        return PickerServer(settings.picker, settings.edge, self._check_room, self._http_port, count)

    @property
    def address(self) -> str:
        """host:port of the HTTP API."""
        return self.http.address

    @property
    def endpoints(self) -> dict[str, str]:
        """Addresses by API, for the launcher."""
        endpoints = {"http": self.http.address, "grpc": self.grpc.address, "metrics": self.http.address}
        return endpoints if self.picker is None else {**endpoints, "picker": self.picker.address}

    async def start(self) -> None:
        """Starts both servers and begins to connect to the workers; raises ConfigError where a port is taken."""
        if self._tracer is not None:
            self._tracer.start()
        await self.http.start()
        await self.grpc.start()
        await self.grpc.set_serving(True)
        for model in self._models:
            model.fleet.start()
        self._watch.start()
        self._kept.start(self._app)
        if self.picker is not None:
            await self.picker.start()
        gc.collect()
        gc.freeze()  # what the start allocated stays: no later collection has to scan it
        self._models[0].metrics.watch_loop()

    async def close(self) -> None:
        """Finishes the requests that it has within drain_timeout_s and refuses others; then stops both servers, and
        ends the sessions."""
        await self.grpc.set_serving(False)
        await asyncio.gather(*(model.dispatcher.drain(self._settings.drain_timeout_s) for model in self._models))
        if self.picker is not None:
            await self.picker.close()
        await self._kept.close()
        await self.http.stop()
        await self.grpc.stop()
        await self._watch.close()
        for model in self._models:
            await model.close()
        if self._tracer is not None:
            await self._tracer.close()
        await self._stores.close()
        if self._store is not None:
            await self._store.close()
        if self._records is not None:
            await self._records.close()

    def hurry(self) -> None:
        """See `HurriedService`."""
        for model in self._models:
            model.dispatcher.hurry()

    def _explain(self, request_id: str, tenant: str) -> inference_pb2.Explanation:
        """Whichever model it was for; raises NotFound, also for another tenant's. `tenant`: empty = all."""
        found = (model.requests.explained.find(request_id) for model in self._models)
        return explanation(next((record for record in found if record is not None), None), request_id, tenant)

    def _request_info(self, request_id: str, tenant: str) -> inference_pb2.RequestInfo:
        """The state of a request of any model; raises NotFound, also for another tenant's. `tenant`: empty = all."""
        found = (model.dispatcher.active(request_id) for model in self._models)
        return request_info(next((active for active in found if active is not None), None), request_id, tenant)

    def _metrics_page(self) -> bytes:
        registries = [model.metrics.registry for model in self._models]
        return self._models[0].metrics.page() if len(registries) == 1 else joined_page(registries)

    def _check_room(self, hints: SchedulingHints) -> None:
        """See `Picker`. It knows no model: there is room where any has some."""
        refused: TandemError | None = None
        for model in self._models:
            try:
                model.dispatcher.check_room(hints.tenant, hints.priority, hints.ttft_timeout_s)
                return
            except TandemError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _http_port(self) -> int:
        return Address.parse(self.http.address, "http").port


async def start(settings: RouterSettings) -> RouterService:
    """Starts the router that the settings describe."""
    service = RouterService(settings)
    await service.start()
    logger.info("HTTP on %s, gRPC on %s", service.http.address, service.grpc.address)
    return service
