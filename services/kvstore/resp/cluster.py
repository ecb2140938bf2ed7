"""A Redis Cluster: every command goes to the node that serves its slot, also after slots have moved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import hiredis

from services.kvstore.resp.client import check_server, not_covered, replies_of
from services.kvstore.resp.command import NUM_SLOTS, Command
from services.kvstore.resp.redis_node import RedisConnection, RedisNode
from services.kvstore.resp.redis_url import Endpoint, RedisAddress
from shared.errors import ConfigError, StoreUnavailable

MAX_REDIRECTIONS = 4
RETRY_S = 0.01
_SLOTS = Command.of("CLUSTER", "SLOTS")
_ASKING = Command.of("ASKING")


class ClusterRedis:
    """`RedisClient` over a cluster. One call is one round trip to each node concerned, all at the same time.

    The slot map is asked from any node that answers; again when a slot has moved or a node does not answer (its replica
    may have taken over). Replicas are not read from: they lag behind.

    While a slot is being migrated between two nodes, its keys are read one by one; the nodes refuse commands that write
    several of them, which raises StoreUnavailable.
    """

    is_cluster = True

    def __init__(self, address: RedisAddress, timeout_s: float) -> None:
        """`address` names some of the nodes; the others are found. Raises ConfigError for a database number."""
        if address.login.db:
            raise ConfigError("redis_url: a cluster has no database but 0", field="redis_url", limit=0)
        self.address = address.redacted
        self._seeds = address.endpoints
        self._login = address.login
        self._timeout_s = timeout_s
        self._nodes: dict[Endpoint, RedisNode] = {}
        self._slots: list[RedisNode | None] = []  # by slot; empty = not known
        self._discovering = asyncio.Lock()

    async def check(self) -> None:
        """See RedisClient. Raises StoreUnavailable where slots are not served."""
        failure: StoreUnavailable | None = None
        for endpoint in self._seeds:
            node = self._node(endpoint)
            try:
                await node.check()
                [info] = replies_of(node, await node.ask([Command.of("INFO")], RedisConnection.READ))
                check_server(self.address, info, is_cluster=True)
                break
            except StoreUnavailable as error:
                failure = error
        else:
            assert failure is not None
            raise failure
        await self._discover()
        for node in await self.nodes():
            await node.check()

    async def call(self, *commands: Command, connection: RedisConnection = RedisConnection.WRITE) -> list[Any]:
        """See RedisClient."""
        if not self._slots:
            await self._discover()
        replies: list[Any] = [None] * len(commands)
        waiting: dict[RedisNode, list[int]] = {}
        for i, command in enumerate(commands):
            waiting.setdefault(self._serving(command.slot), []).append(i)
        try:
            await asyncio.gather(*(self._ask(node, commands, at, replies, connection) for node, at in waiting.items()))
        except StoreUnavailable:
            self._slots = []
            raise
        for i, reply in enumerate(replies):
            if isinstance(reply, hiredis.ReplyError):
                replies[i] = await self._redirected(commands[i], reply, connection)
        return replies

    async def nodes(self) -> Sequence[RedisNode]:
        """See RedisClient."""
        if not self._slots:
            await self._discover()
        return tuple(dict.fromkeys(node for node in self._slots if node is not None))

    async def close(self) -> None:
        """See RedisClient."""
        for node in self._nodes.values():
            node.close()
        self._nodes.clear()
        self._slots = []

    async def _ask(
        self,
        node: RedisNode,
        commands: Sequence[Command],
        at: list[int],
        replies: list[Any],
        connection: RedisConnection,
    ) -> None:
        for i, reply in zip(at, await node.ask([commands[i] for i in at], connection), strict=True):
            replies[i] = reply

    async def _redirected(self, command: Command, error: hiredis.ReplyError, connection: RedisConnection) -> Any:
        """Follows the redirection of a moved slot. Raises StoreUnavailable for any other error."""
        for attempt in range(MAX_REDIRECTIONS):
            kind, *where = str(error).split()
            if kind == "TRYAGAIN":  # some of the command's keys have moved already
                verb, *keys = _parts_of(command)
                if verb == b"MGET":
                    return [await self._get(key, command.slot, connection) for key in keys]
                await asyncio.sleep(RETRY_S * 2**attempt)
                [reply] = await self._serving(command.slot).ask([command], connection)
            elif kind == "MOVED" and len(where) == 2:
                node = self._node(self._endpoint(where[1], self._seeds[0]))
                if self._slots:
                    self._slots[int(where[0])] = node
                [reply] = await node.ask([command], connection)
            elif kind == "ASK" and len(where) == 2:
                node = self._node(self._endpoint(where[1], self._seeds[0]))
                _, reply = await node.ask([_ASKING, command], connection)
            else:
                break
            if not isinstance(reply, hiredis.ReplyError):
                return reply
            error = reply
        raise StoreUnavailable(f"the Redis cluster at {self.address} is unavailable: {error}", address=self.address)

    async def _get(self, key: bytes, slot: int, connection: RedisConnection) -> Any:
        [value] = await self.call(Command.of("GET", key, slot=slot), connection=connection)
        return value

    def _serving(self, slot: int) -> RedisNode:
        node = self._slots[slot] if self._slots else None
        if node is None:
            self._slots = []
            raise not_covered(self.address)
        return node

    async def _discover(self) -> None:
        """Asks one node after another for the map of slots. Raises StoreUnavailable when none answers or slots are
        missing."""
        async with self._discovering:
            if self._slots:
                return
            failure: StoreUnavailable | None = None
            for endpoint in dict.fromkeys((*self._seeds, *self._nodes)):
                node = self._node(endpoint)
                try:
                    [ranges] = replies_of(node, await node.ask([_SLOTS], RedisConnection.READ))
                except StoreUnavailable as error:
                    failure = error
                    continue
                slots = self._read(ranges, endpoint)
                if None in slots:
                    failure = not_covered(self.address)
                    continue
                self._slots = slots
                return
            assert failure is not None
            raise failure

    def _read(self, ranges: list[list[Any]], asked: Endpoint) -> list[RedisNode | None]:
        """CLUSTER SLOTS: [first, last, [host, port, id, …] of the primary, then replicas] for each range."""
        slots: list[RedisNode | None] = [None] * NUM_SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            node = self._node(Endpoint((host or b"").decode() or asked.host, port))
            slots[first : last + 1] = [node] * (last + 1 - first)
        return slots

    def _node(self, endpoint: Endpoint) -> RedisNode:
        node = self._nodes.get(endpoint)
        if node is None:
            node = self._nodes[endpoint] = RedisNode(endpoint, self._login, self._timeout_s)
        return node

    def _endpoint(self, text: str, asked: Endpoint) -> Endpoint:
        """From a redirection: host:port, or :port for the host that was asked."""
        host, _, port = text.rpartition(":")
        return Endpoint(host or asked.host, int(port))


def _parts_of(command: Command) -> list[bytes]:
    """The parts of a packed command."""
    reader = hiredis.Reader()
    reader.feed(command.packed)
    parts: list[bytes] = reader.gets()
    return parts
