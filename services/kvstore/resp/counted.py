"""A Redis client that measures its round trips."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from services.kvstore.resp.client import RedisClient
from services.kvstore.resp.command import Command
from services.kvstore.resp.redis_node import RedisConnection, RedisNode
from shared.telemetry.buckets import BucketCounts

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)


class CountedRedis:
    """`RedisClient` over another one, which it owns."""

    def __init__(self, redis: RedisClient) -> None:
        self.address = redis.address
        self.is_cluster = redis.is_cluster
        self.round_trips_s: Mapping[str, BucketCounts] = {
            connection.name.lower(): BucketCounts(BUCKETS_S) for connection in RedisConnection
        }
        """Duration of round trips by connection, failed ones too; on a cluster one round trip asks several nodes at
        once."""
        self._redis = redis

    async def check(self) -> None:
        """See RedisClient."""
        await self._redis.check()

    async def call(self, *commands: Command, connection: RedisConnection = RedisConnection.WRITE) -> list[Any]:
        """See RedisClient."""
        begun = time.perf_counter()
        try:
            return await self._redis.call(*commands, connection=connection)
        finally:
            self.round_trips_s[connection.name.lower()].add(time.perf_counter() - begun)

    async def nodes(self) -> Sequence[RedisNode]:
        """See RedisClient."""
        return await self._redis.nodes()

    async def close(self) -> None:
        """See RedisClient."""
        await self._redis.close()
