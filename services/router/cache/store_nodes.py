"""All store nodes that the router knows, asked at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc.aio

from shared.block_service.client import BlockClient
from shared.errors import TandemError
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc

TIMEOUT_S = 10.0
"""A flush deletes files."""
STATS_TIMEOUT_S = 2.0

T = TypeVar("T")
ClientT = TypeVar("ClientT", bound=BlockClient)


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What one node said, or why it said nothing."""

    name: str
    address: str
    value: T | None
    error: TandemError | None = None


class StoreNodeClient(BlockClient):
    """One node's operator side. Every method raises as those of a BlockClient."""

    async def stats(self) -> kvstore_pb2.TierStatsList:
        """Its tiers, tenants and pins."""
        request = kvstore_pb2.GetTierStatsRequest()
        return await self._call(lambda stub: stub.GetTierStats(request, timeout=STATS_TIMEOUT_S))

    async def pin(self, request: kvstore_pb2.PinRequest) -> kvstore_pb2.PinStatus:
        """Keeps blocks. Raises InvalidRequest where they have no room."""
        return (await self._call(lambda stub: stub.Pin(request, timeout=TIMEOUT_S))).pin

    async def unpin(self, name: str) -> kvstore_pb2.PinStatus:
        """Ends a pin. Raises NotFound."""
        request = kvstore_pb2.UnpinRequest(name=name)
        ended = await self._call(lambda stub: stub.Unpin(request, timeout=TIMEOUT_S))
        return kvstore_pb2.PinStatus(name=name, num_blocks=ended.num_blocks)

    async def _call(self, call: Callable[[kvstore_pb2_grpc.StoreServiceAsyncStub], Awaitable[T]]) -> T:
        stub: kvstore_pb2_grpc.StoreServiceAsyncStub = kvstore_pb2_grpc.StoreServiceStub(self.connected())
        try:
            return await call(stub)
        except grpc.aio.AioRpcError as error:
            raise self.translate(error) from error


async def ask(clients: Mapping[str, ClientT], call: Callable[[str, ClientT], Awaitable[T]]) -> list[Answer[T]]:
    """What `call` gets of each; never raises for what one of them did."""

    async def one(name: str, client: ClientT) -> Answer[T]:
        try:
            return Answer(name, client.address, await call(name, client))
        except TandemError as error:
            return Answer(name, client.address, None, error)

    return await asyncio.gather(*(one(name, client) for name, client in clients.items()))


class StoreNodes:
    """Clients by node name."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """`addresses` are host:port by name, the same names that the workers know. Connects on first use."""
        self._clients = {name: StoreNodeClient(address) for name, address in addresses.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """All nodes."""
        return tuple(self._clients)

    async def ask(
        self, call: Callable[[str, StoreNodeClient], Awaitable[T]], among: Collection[str] | None = None
    ) -> list[Answer[T]]:
        """What `call` gets of each node, or of those named; never raises for what a node did."""

        return await ask(
            {name: client for name, client in self._clients.items() if among is None or name in among}, call
        )

    async def close(self) -> None:
        """Ends the connections; twice is fine."""
        for client in self._clients.values():
            await client.close()
