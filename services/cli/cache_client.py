"""The client of tandem.v1.CacheService, which a router serves together with InferenceService."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

from shared.rpc.pb.tandem.v1 import cache_pb2, cache_pb2_grpc
from tandem import AsyncTandemClient

TIMEOUT_S = 30.0

T = TypeVar("T")


class CacheClient(AsyncTandemClient):
    """Raises like `AsyncTandemClient.ask`; NotFound for a pin that does not exist."""

    async def stats(self) -> cache_pb2.CacheStats:
        """Index, store nodes, tenants."""
        return await self._cache(lambda stub, **call: stub.GetCacheStats(cache_pb2.GetCacheStatsRequest(), **call))

    async def flush(self, tenant: str | None) -> cache_pb2.FlushCacheResponse:
        """Drops one tenant's blocks from the store nodes, or all blocks from store nodes and workers."""
        request = cache_pb2.FlushCacheRequest(tenant=tenant)
        return await self._cache(lambda stub, **call: stub.FlushCache(request, **call))

    async def pin(self, request: cache_pb2.PinPrefixRequest) -> cache_pb2.PinPrefixResponse:
        """Keeps a prefix."""
        return await self._cache(lambda stub, **call: stub.PinPrefix(request, **call))

    async def unpin(self, name: str) -> cache_pb2.UnpinPrefixResponse:
        """Ends a pin."""
        request = cache_pb2.UnpinPrefixRequest(name=name)
        return await self._cache(lambda stub, **call: stub.UnpinPrefix(request, **call))

    async def _cache(self, call: Callable[..., Awaitable[T]]) -> T:
        def at(channel: grpc.aio.Channel) -> Awaitable[T]:
            return call(cache_pb2_grpc.CacheServiceStub(channel), metadata=self.key, timeout=TIMEOUT_S)

        return await self.ask(at)
