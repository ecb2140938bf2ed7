"""Makes a Redis client from settings."""

from __future__ import annotations

from services.kvstore.resp.address import RedisAddress
from services.kvstore.resp.client import RedisClient, SingleRedis
from services.kvstore.resp.cluster import ClusterRedis


def redis_client(url: str, timeout_s: float, *, cluster: bool = False) -> RedisClient:
    """A client that connects on first use. Raises ConfigError (field redis_url)."""
    address = RedisAddress.parse(url)
    return ClusterRedis(address, timeout_s) if cluster else SingleRedis(address, timeout_s)
