"""`tandem drain` and `tandem undrain`: workers that take no new requests for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import grpc.aio
import typer

from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc
from tandem import AsyncTandemClient
from tandem_cli.options import LOCAL, Connection

TIMEOUT_S = 30.0

Workers = Annotated[list[str], typer.Argument(help="Names, as `tandem status` shows them.")]


class FleetClient(AsyncTandemClient):
    """Raises like `AsyncTandemClient.ask`; NotFound for an unknown worker, DeadlineExceeded where one is too slow."""

    async def drain(self, workers: Sequence[str]) -> fleet_pb2.DrainedWorkers:
        """Lets the workers take no new requests; running ones continue."""
        request = fleet_pb2.DrainWorkersRequest(workers=workers)
        return await self._fleet(lambda stub, **call: stub.Drain(request, **call))

    async def undrain(self, workers: Sequence[str]) -> fleet_pb2.DrainedWorkers:
        """Lets drained workers take requests again."""
        request = fleet_pb2.DrainWorkersRequest(workers=workers)
        return await self._fleet(lambda stub, **call: stub.Undrain(request, **call))

    async def _fleet(self, call: Callable[..., Awaitable[fleet_pb2.DrainedWorkers]]) -> fleet_pb2.DrainedWorkers:
        def at(channel: grpc.aio.Channel) -> Awaitable[fleet_pb2.DrainedWorkers]:
            return call(fleet_pb2_grpc.FleetServiceStub(channel), metadata=self.key, timeout=TIMEOUT_S)

        return await self.ask(at)


def drain(workers: Workers, connection: Connection = LOCAL) -> None:
    """Let workers take no new requests, from any router; running requests continue."""
    done = asyncio.run(_call(connection.open(FleetClient), lambda client: client.drain(workers)))
    for worker in done.workers:
        print(f"{worker.worker.name} drains, {worker.load.num_running} sequences still run")


def undrain(workers: Workers, connection: Connection = LOCAL) -> None:
    """Let drained workers take requests again."""
    done = asyncio.run(_call(connection.open(FleetClient), lambda client: client.undrain(workers)))
    for worker in done.workers:
        print(f"{worker.worker.name} takes requests again")


async def _call(
    client: FleetClient, ask: Callable[[FleetClient], Awaitable[fleet_pb2.DrainedWorkers]]
) -> fleet_pb2.DrainedWorkers:
    async with client:
        return await ask(client)
