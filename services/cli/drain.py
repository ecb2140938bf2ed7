"""`tandem drain` and `tandem undrain`: workers that take no new requests for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import grpc.aio
import typer

from services.cli.client import InferenceClient
from services.cli.options import DEFAULT_TARGET, ApiKey, Target
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc

TIMEOUT_S = 30.0

Workers = Annotated[list[str], typer.Argument(help="Names, as `tandem status` shows them.")]


class FleetClient(InferenceClient):
    """Raises like `InferenceClient`; NotFound for an unknown worker, DeadlineExceeded where one does not comply."""

    async def drain(self, workers: Sequence[str]) -> fleet_pb2.DrainedWorkers:
        """They take no new requests."""
        request = fleet_pb2.DrainWorkersRequest(workers=workers)
        return await self._fleet(lambda stub, **call: stub.Drain(request, **call))

    async def undrain(self, workers: Sequence[str]) -> fleet_pb2.DrainedWorkers:
        """They take requests again."""
        request = fleet_pb2.DrainWorkersRequest(workers=workers)
        return await self._fleet(lambda stub, **call: stub.Undrain(request, **call))

    async def _fleet(self, call: Callable[..., Awaitable[fleet_pb2.DrainedWorkers]]) -> fleet_pb2.DrainedWorkers:
        assert self._channel is not None, "use the client in `async with`"
        try:
            return await call(
                fleet_pb2_grpc.FleetServiceStub(self._channel), metadata=self._metadata, timeout=TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise self._typed(error, answered=False) from error


def drain(workers: Workers, target: Target = DEFAULT_TARGET, api_key: ApiKey = "") -> None:
    """Let workers take no new requests, from any router; what they run goes on."""
    done = asyncio.run(_call(FleetClient(target, api_key), lambda client: client.drain(workers)))
    for worker in done.workers:
        print(f"{worker.worker.name} drains, {worker.load.num_running} sequences still run")


def undrain(workers: Workers, target: Target = DEFAULT_TARGET, api_key: ApiKey = "") -> None:
    """Let drained workers take requests again."""
    done = asyncio.run(_call(FleetClient(target, api_key), lambda client: client.undrain(workers)))
    for worker in done.workers:
        print(f"{worker.worker.name} takes requests again")


async def _call(
    client: FleetClient, ask: Callable[[FleetClient], Awaitable[fleet_pb2.DrainedWorkers]]
) -> fleet_pb2.DrainedWorkers:
    async with client:
        return await ask(client)
