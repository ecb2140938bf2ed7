"""The KV store service: index, sweeper and probe of Redis, and the block tiers, behind one gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc.aio

from services.kvstore.availability import Availability
from services.kvstore.index.block_index import BlockIndex, ResyncNeeded
from services.kvstore.index.redis_index import RedisIndex
from services.kvstore.index.sweeper import Sweeper
from services.kvstore.metrics import METRICS, NODE_METRICS, KVStoreSources
from services.kvstore.record_service import SERVICE_NAME as RECORD_SERVICE_NAME
from services.kvstore.record_service import RecordServicer, RedisRecords
from services.kvstore.resp.counted import CountedRedis
from services.kvstore.resp.open import redis_client
from services.kvstore.servicer import SERVICE_NAME, CountedIndex, KVStoreServicer
from services.kvstore.settings import KVStoreSettings
from services.kvstore.store_node import NodeConfig, StoreNode
from services.kvstore.store_servicer import SERVICE_NAME as STORE_SERVICE_NAME
from services.kvstore.store_servicer import StoreServicer
from services.kvstore.tiers.accounts import Quotas
from shared.block_service.servicer import SERVICE_NAME as BLOCK_SERVICE_NAME
from shared.block_service.servicer import BlockServicer
from shared.errors import ConfigError, StoreUnavailable
from shared.identity import WorkerIdentity, WorkerRole
from shared.kernels.cpu.multilinear import fastest_sum
from shared.kv.fleet_key import FleetKey, token_of
from shared.kv.ucx import UcxTransfer
from shared.kv_index.holders import UNSTAMPED, EventStamp, Tier, join_hashes
from shared.kv_index.publisher import IndexPublisher
from shared.records.records import Bounds
from shared.rpc.fleet_identity import FleetGuard
from shared.rpc.pb.tandem.v1 import kvstore_pb2_grpc
from shared.rpc.server import RpcServer
from shared.telemetry.metrics import Metrics
from shared.telemetry.metrics_server import MetricsServer
from shared.telemetry.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 0.5
"""Between two probes of Redis. Seconds."""
SWEEP_INTERVAL_S = 5.0
"""Between two checks for workers that fell silent and for records to prune. Seconds."""


class LocalIndexWriter:
    """`IndexWriter` over an index in the same process."""

    def __init__(self, index: BlockIndex, availability: Availability) -> None:
        """Does not close its arguments."""
        self._index = index
        self._availability = availability

    async def publish(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.HOST, stamp: EventStamp = UNSTAMPED
    ) -> bool:
        """See IndexWriter."""
        return await self._change(self._index.publish, worker, hashes, tier, stamp)

    async def remove(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.HOST, stamp: EventStamp = UNSTAMPED
    ) -> bool:
        """See IndexWriter."""
        return await self._change(self._index.remove, worker, hashes, tier, stamp)

    async def _change(
        self,
        call: Callable[[WorkerIdentity, Tier, bytes, EventStamp], Awaitable[int]],
        worker: WorkerIdentity,
        hashes: Sequence[bytes],
        tier: Tier,
        stamp: EventStamp,
    ) -> bool:
        self._availability.require()
        try:
            await self._availability.watched(call(worker, tier, join_hashes(hashes), stamp))
        except ResyncNeeded:
            return False
        return True


class KVStoreServer:
    """`start()` returns once it serves, even if Redis does not answer yet; `close()` drains and is idempotent."""

    def __init__(self, settings: KVStoreSettings, probe_interval_s: float = PROBE_INTERVAL_S) -> None:
        """Raises ConfigError for a malformed URL or a disk tier without a folder; no I/O before `start()`.

        `probe_interval_s`: seconds between two probes of Redis.
        """
        self._settings = settings
        self._fleet_key = FleetKey.of(settings.fleet_key.get_secret_value(), settings.block_encryption)
        self._redis = CountedRedis(
            redis_client(
                settings.redis_url.get_secret_value(),
                settings.redis_timeout_s,
                cluster=settings.redis_cluster,
                password=settings.redis_password.get_secret_value(),
            )
        )
        self._index = CountedIndex(RedisIndex(self._redis))
        self._sweeper = Sweeper(self._redis, SWEEP_INTERVAL_S, settings.lease_s)
        self._availability = Availability(self._index.probe, self._on_change, probe_interval_s)
        self._node_name = settings.name or f"store@{socket.gethostname()}/{settings.bind}"
        self._tracer = Tracer.of(settings.traces, "tandem-kvstore", self._node_name)
        self._servicer = KVStoreServicer(self._index, self._availability, self._tracer)
        self._node = self._make_node() if settings.host_bytes or settings.disk_bytes else None
        bounds = Bounds(settings.records.max_bytes, settings.records.tenant_bytes)
        self._records = RecordServicer(RedisRecords(self._redis, bounds), self._availability)
        names: tuple[str, ...] = (SERVICE_NAME, RECORD_SERVICE_NAME)
        if self._node is not None:
            names = (*names, STORE_SERVICE_NAME, BLOCK_SERVICE_NAME)
        settings.tls.check("tls", mutual=True)
        self._rpc = RpcServer(settings.bind, self._register, names, credentials=settings.tls.server_credentials())
        self._metrics = Metrics("tandem-kvstore", self._node_name)
        sources = KVStoreSources(self._index.counters, self._sweeper.counters, self._availability, self._redis)
        self._metrics.observe(METRICS, sources)
        if self._node is not None:
            self._metrics.observe(NODE_METRICS, self._node)
        if self._tracer is not None:
            self._tracer.observe(self._metrics)
        self._metrics_server = MetricsServer(settings.metrics, self._metrics.registry, self._not_ready_reason)

    @property
    def address(self) -> str:
        """host:port, once started."""
        return self._rpc.address

    @property
    def endpoints(self) -> Mapping[str, str]:
        """Address of the metrics page, if there is one."""
        return {"metrics": self._metrics_server.address} if self._metrics_server.address else {}

    async def start(self) -> None:
        """Raises ConfigError when the port is taken or Redis refuses our credentials.

        It starts even while Redis does not answer: health is NOT_SERVING until it does.
        """
        try:
            if self._tracer is not None:
                self._tracer.start()
            await self._metrics_server.start()
            self._metrics.watch_loop()
            with contextlib.suppress(StoreUnavailable):  # the first probe below logs it and sets the health
                await self._index.start()
            await self._rpc.start()
            await self._availability.start()
            await self._sweeper.start()
            if self._node is not None:
                if self._fleet_key is not None:
                    self._fleet_key.use(await asyncio.to_thread(fastest_sum))
                await self._node.start()
                if self._settings.block_bytes:
                    await self._node.open(self._settings.block_bytes)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Refuses new calls, lets running ones end within drain_timeout_s, then frees everything."""
        await self._sweeper.close()
        await self._availability.close()
        await self._rpc.set_serving(False)
        # Both at once: else a client whose stream has ended could open a new one, which would be cut off at once.
        drain_s = self._settings.drain_timeout_s
        await asyncio.gather(self._rpc.stop(drain_s), self._servicer.drain(drain_s))
        if self._node is not None:
            await self._node.close()
        await self._index.close()
        await self._redis.close()
        if self._tracer is not None:
            await self._tracer.close()
        self._metrics_server.close()
        self._metrics.close()

    def _register(self, server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KVStoreServiceServicer_to_server(self._servicer, server)
        kvstore_pb2_grpc.add_RecordServiceServicer_to_server(self._records, server)
        if self._node is not None:
            kvstore_pb2_grpc.add_StoreServiceServicer_to_server(StoreServicer(self._node, self._node_name), server)
            kvstore_pb2_grpc.add_BlockServiceServicer_to_server(
                BlockServicer(self._node, FleetGuard(token_of(self._fleet_key)), self._tracer), server
            )

    def _make_node(self) -> StoreNode:
        settings = self._settings
        if settings.disk_bytes and settings.disk_folder is None:
            raise ConfigError("disk_bytes is set, but no disk_folder", field="disk_folder")
        config = NodeConfig(
            settings.host_bytes,
            settings.disk_folder,
            settings.disk_bytes,
            settings.staging_bytes,
            settings.send_bytes_per_s,
            _quotas(settings),
            settings.pin_share,
            self._node_name if settings.disk_shared else "",
        )
        identity = WorkerIdentity(self._node_name, secrets.randbits(63) + 1, WorkerRole.STORE)
        claims = LocalIndexWriter(self._index, self._availability)

        def publisher(tier: Tier) -> IndexPublisher:
            return IndexPublisher(claims, identity, tier=tier)

        return StoreNode(config, UcxTransfer(fleet_key=self._fleet_key), publisher, self._fleet_key)

    async def _on_change(self, error: StoreUnavailable | None) -> None:
        if error is None:
            logger.info("the index at %s answers", self._redis.address)
        else:
            logger.warning("%s; calls are refused until it answers", error)
        await self._rpc.set_serving(error is None)

    def _not_ready_reason(self) -> str:
        if self._rpc.serving:
            return ""
        return "draining" if self._availability.available else "Redis does not answer"


def _quotas(settings: KVStoreSettings) -> dict[Tier, Quotas]:
    named = settings.tenant_quotas
    return {
        Tier.HOST: Quotas(settings.tenant_quota.host_bytes, {name: quota.host_bytes for name, quota in named.items()}),
        Tier.DISK: Quotas(settings.tenant_quota.disk_bytes, {name: quota.disk_bytes for name, quota in named.items()}),
    }


async def start(settings: KVStoreSettings) -> KVStoreServer:
    """Starts the KV store that the settings describe."""
    server = KVStoreServer(settings)
    await server.start()
    return server
