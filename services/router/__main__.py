"""`python -m services.router`: one router replica."""

from __future__ import annotations

import gc
import logging
import sys
import zlib
from typing import TYPE_CHECKING

import grpc.aio

from services.router.cache.prefix import PrefixReader
from services.router.cache.servicer import SERVICE_NAME as CACHE_SERVICE_NAME
from services.router.cache.servicer import CacheServicer
from services.router.cache.watch import CacheWatch
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.drain import Drain
from services.router.edge.generation_defaults import NO_DEFAULTS, GenerationDefaults
from services.router.edge.grpc_api import SERVICE_NAME as INFERENCE_SERVICE_NAME
from services.router.edge.grpc_api import InferenceServicer, server_options
from services.router.edge.http.app import build_app
from services.router.edge.http.server import HttpServer
from services.router.edge.input_processor import InputProcessor
from services.router.edge.scheduling import SchedulingHints
from services.router.explanation import explanation
from services.router.fleet_servicer import SERVICE_NAME as FLEET_SERVICE_NAME
from services.router.fleet_servicer import FleetServicer
from services.router.metrics import RouterMetrics
from services.router.placement.policy import Placement
from services.router.request_info import request_info
from services.router.settings import RouterSettings
from services.router.status import cluster_status
from services.router.workers.configured import discovery_of
from services.router.workers.fleet import Fleet
from services.router.workers.liveness import LivenessLimits
from shared.address import Address, parse_named
from shared.block_service.store_nodes import StoreNodes
from shared.kv.fleet_key import FleetKey, token_of
from shared.kv_index.client import KVStoreClient
from shared.model.chat_template import ChatTemplate
from shared.model.config import ModelConfig
from shared.model.tokenizer import Tokenizer
from shared.process import run_service
from shared.rpc.pb.tandem.v1 import inference_pb2
from shared.rpc.server import RpcServer
from shared.structure.compiler import StructureCompiler

if TYPE_CHECKING:
    from services.router.picker.server import PickerServer

logger = logging.getLogger(__name__)


class RouterService:
    """Implements `shared.process.Service`."""

    def __init__(self, settings: RouterSettings) -> None:
        """Reads tokenizer and template and composes the parts; raises ConfigError, ModelLoadError."""
        self._settings = settings
        self._discovery = discovery_of(settings)
        settings.tls.check("tls", mutual=True)
        settings.edge.tls.check("edge.tls", mutual=False)
        self._tokenizer = Tokenizer.load(settings.model)
        self._template = ChatTemplate.load(settings.model, self._tokenizer.special_tokens)
        self._defaults = GenerationDefaults.load(settings.model) if settings.edge.generation_defaults else NO_DEFAULTS
        self._model_name = settings.served_model_name or settings.model.resolve().name
        self._credentials = settings.tls.channel_credentials()
        self._token = token_of(FleetKey.of(settings.fleet_key.get_secret_value()))
        tenants = {"default", *settings.edge.tenants, *settings.admission.tenant_weights}
        self._metrics = RouterMetrics(self._model_name, sorted(tenants), settings.name)
        self._fleet = self._new_fleet()
        self._store = self._new_store_client()
        self._stores = StoreNodes(parse_named(settings.stores, "stores", unnamed=True), self._credentials, self._token)
        self._watch = CacheWatch(self._store, self._stores)
        self._lookup = PrefixLookup(self._store, self._fleet)
        self._dispatcher = self._new_dispatcher()
        self._drain = Drain(self._dispatcher)
        structures = StructureCompiler(lambda: self._tokenizer, ModelConfig.load(settings.model).eos_token_ids)
        structures.start(self._tokenizer.vocab_size)
        input_processor = InputProcessor(
            self._drain, self._tokenizer, self._template, self._model_name, settings.edge, structures, self._defaults
        )
        self.grpc = self._new_grpc_server(input_processor)
        self.picker = self._new_picker()
        app = build_app(input_processor, settings.edge, self._metrics.page, self._status)
        self.http = HttpServer(settings.http, app, settings.edge.limits, settings.edge.tls)

    def _new_fleet(self) -> Fleet:
        settings = self._settings
        return Fleet(
            settings.name,
            self._discovery,
            self._on_change,
            collocated=settings.mode == "collocated",
            limits=LivenessLimits(settings.suspect_after_s, settings.give_up_after_s),
            credentials=self._credentials,
            token=self._token,
        )

    def _new_store_client(self) -> KVStoreClient | None:
        if not self._settings.kvstore:
            return None
        address = Address.parse(self._settings.kvstore, "kvstore", min_port=1)
        return KVStoreClient(str(address), credentials=self._credentials)

    def _new_dispatcher(self) -> Dispatcher:
        settings = self._settings
        placement = Placement(
            settings.placement.config(settings.max_queued_tokens), seed=zlib.crc32(settings.name.encode())
        )
        return Dispatcher(self._fleet, placement, self._lookup, self._metrics, settings.dispatch_config())

    def _new_grpc_server(self, input_processor: InputProcessor) -> RpcServer:
        """The server of all gRPC services, those of operators included."""
        edge = self._settings.edge
        inference = InferenceServicer(
            input_processor,
            edge,
            self._status,
            lambda request_id: explanation(self._dispatcher.decisions, request_id),
            lambda request_id: request_info(self._dispatcher.active(request_id), request_id),
            self._settings.name,
        )
        cache = CacheServicer(
            self._fleet,
            self._store,
            self._stores,
            PrefixReader(self._tokenizer, self._template),
            self._metrics.tenants,
            edge,
            self._credentials,
            self._token,
        )
        fleet = FleetServicer(self._fleet, edge)

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

        return PickerServer(settings.picker, settings.edge, self._check_room, self._http_port, self._metrics.picked)

    @property
    def address(self) -> str:
        """host:port of the HTTP API."""
        return self.http.address

    @property
    def endpoints(self) -> dict[str, str]:
        """All addresses, for the launcher."""
        endpoints = {"http": self.http.address, "grpc": self.grpc.address, "metrics": self.http.address}
        return endpoints if self.picker is None else {**endpoints, "picker": self.picker.address}

    async def start(self) -> None:
        """Starts both servers and begins to connect to the workers; raises ConfigError where a port is taken."""
        await self.http.start()
        await self.grpc.start()
        await self.grpc.set_serving(True)
        self._fleet.start()
        self._watch.start()
        if self.picker is not None:
            await self.picker.start()
        gc.collect()
        gc.freeze()  # what the start allocated stays: no later collection has to scan it
        self._metrics.watch_loop()

    async def close(self) -> None:
        """Finishes the requests that it has within drain_timeout_s and refuses others; then stops both servers, and
        ends the sessions."""
        await self.grpc.set_serving(False)
        await self._drain.finish(self._settings.drain_timeout_s)
        if self.picker is not None:
            await self.picker.close()
        await self.http.stop()
        await self.grpc.stop()
        await self._watch.close()
        await self._fleet.close()
        await self._stores.close()
        if self._store is not None:
            await self._store.close()
        self._metrics.close()

    def _status(self) -> inference_pb2.ClusterStatus:
        """The cluster as this router sees it."""
        now = cluster_status(
            self._settings,
            self._model_name,
            self._fleet,
            self._dispatcher,
            self._lookup,
            self._metrics,
            self._watch.failures,
        )
        now.not_ready_reason = self._drain.not_ready_reason()
        now.ready = not now.not_ready_reason
        return now

    def _check_room(self, hints: SchedulingHints) -> None:
        """See `Picker`."""
        self._drain.check_room(hints.tenant, hints.priority, hints.ttft_timeout_s)

    def _http_port(self) -> int:
        return Address.parse(self.http.address, "http").port

    def _on_change(self) -> None:
        self._dispatcher.pump()


async def start(settings: RouterSettings) -> RouterService:
    """Starts the router that the settings describe."""
    service = RouterService(settings)
    await service.start()
    logger.info("HTTP on %s, gRPC on %s", service.http.address, service.grpc.address)
    return service


if __name__ == "__main__":
    sys.exit(run_service("tandem-router", RouterSettings, start))
