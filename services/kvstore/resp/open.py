"""Makes a Redis client from settings."""

from __future__ import annotations

from services.kvstore.resp.client import RedisClient, SingleRedis
from services.kvstore.resp.cluster import ClusterRedis
from services.kvstore.resp.redis_url import RedisAddress


def redis_client(url: str, timeout_s: float, *, cluster: bool = False, password: str = "") -> RedisClient:
    """A client that connects on first use, with `password` where the URL names none. Raises ConfigError (field
    redis_url or redis_password)."""
    address = RedisAddress.parse(url, password)
    return ClusterRedis(address, timeout_s) if cluster else SingleRedis(address, timeout_s)
