"""The interface to Redis, one server or a cluster; and its implementation for one server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import hiredis

from services.kvstore.resp.command import Command
from services.kvstore.resp.redis_node import RedisConnection, RedisNode
from services.kvstore.resp.redis_url import RedisAddress
from shared.errors import ConfigError, StoreUnavailable


class RedisClient(Protocol):
    """Safe for concurrent calls. All raise StoreUnavailable in bounded time, and reconnect by themselves."""

    address: str
    """URL without credentials."""
    is_cluster: bool

    async def check(self) -> None:
        """Raises ConfigError for what a retry cannot fix: credentials, certificates, the wrong kind of server."""

    async def call(self, *commands: Command, connection: RedisConnection = RedisConnection.WRITE) -> list[Any]:
        """The replies in order, in one round trip for each node. Raises for the first error reply; the other commands
        have run."""

    async def nodes(self) -> Sequence[RedisNode]:
        """The servers that hold keys, for commands to each of them; see `replies_of`."""

    async def close(self) -> None:
        """Ends all connections; idempotent."""


class SingleRedis:
    """`RedisClient` over one server."""

    is_cluster = False

    def __init__(self, address: RedisAddress, timeout_s: float) -> None:
        """Connects on first use. Raises ConfigError when the address names several servers."""
        if len(address.endpoints) != 1:
            raise ConfigError(
                "redis_url names several hosts: set redis_cluster, or name one", field="redis_url", limit=1
            )
        self.address = address.redacted
        self._node = RedisNode(address.endpoints[0], address.login, timeout_s)

    async def check(self) -> None:
        """See RedisClient."""
        await self._node.check()
        [info] = replies_of(self._node, await self._node.ask([Command.of("INFO")], RedisConnection.READ))
        check_server(self.address, info, is_cluster=False)

    async def call(self, *commands: Command, connection: RedisConnection = RedisConnection.WRITE) -> list[Any]:
        """See RedisClient."""
        return replies_of(self._node, await self._node.ask(commands, connection))

    async def nodes(self) -> Sequence[RedisNode]:
        """See RedisClient."""
        return (self._node,)

    async def close(self) -> None:
        """See RedisClient."""
        self._node.close()


def replies_of(node: RedisNode, replies: list[Any]) -> list[Any]:
    """The replies. Raises StoreUnavailable for the first that is an error."""
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise node.unavailable(reply)
    return replies


def check_server(address: str, info: bytes, *, is_cluster: bool) -> None:
    """Raises ConfigError if the server is of the other kind or may evict keys, which would lose index entries."""
    fields = info_fields(info)
    if (fields.get("cluster_enabled") == "1") != is_cluster:
        found, setting = ("no node of a cluster", "off") if is_cluster else ("a node of a cluster", "on")
        raise ConfigError(f"Redis at {address} is {found}: switch redis_cluster {setting}", field="redis_cluster")
    policy = fields.get("maxmemory_policy", "noeviction")
    if fields.get("maxmemory", "0") != "0" and policy != "noeviction":
        raise ConfigError(
            f"Redis at {address} evicts keys when it is full (maxmemory-policy {policy}): the index needs noeviction",
            field="redis_url",
        )


def info_fields(info: bytes) -> dict[str, str]:
    """INFO's `name:value` lines."""
    lines = info.decode(errors="replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def not_covered(address: str) -> StoreUnavailable:
    """The error of a cluster that cannot serve all keys."""
    return StoreUnavailable(f"the Redis cluster at {address} does not serve all slots", address=address)
