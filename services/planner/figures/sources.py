"""Reads routers and workers over the network: their metrics pages, the routers' status, and drains."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import grpc.aio

from services.planner.cluster.pods import Pod
from services.planner.figures.page import Page
from shared.errors import DeadlineExceeded, TandemError, WorkerLost
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2
from tandem import AsyncTandemClient, ClientTls

T = TypeVar("T")

DRAIN_TIMEOUT_S = 15.0
"""A router answers Drain once the workers have said that they do."""


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """One router's answers."""

    name: str
    page: Page
    status: inference_pb2.ClusterStatus


class Sources:
    """One HTTP session and a gRPC channel a router. `close()` twice is fine.

    Every call raises a TandemError where one of those asked does not answer: figures of a part of the fleet would look
    like a smaller load.
    """

    def __init__(self, api_key: str, timeout_s: float, tls: ClientTls | None = None) -> None:
        """`tls`: of the routers; workers' metrics are plain. Raises ConfigError."""
        self._api_key, self._timeout_s, self._tls = api_key, timeout_s, tls
        self._trust = ssl.create_default_context(cafile=str(tls.ca)) if tls is not None else None
        self._session: aiohttp.ClientSession | None = None
        self._clients: dict[str, AsyncTandemClient] = {}

    async def close(self) -> None:
        """Ends all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()

    async def routers(self, pods: Sequence[Pod]) -> list[RouterFigures]:
        """The figures of all ready routers."""
        ready = [pod for pod in pods if pod.component == "router" and pod.ready]
        return await asyncio.gather(*map(self._router, ready))

    async def pages(self, pods: Sequence[Pod]) -> dict[str, Page]:
        """The metrics pages of these Pods, by name."""
        pages = await asyncio.gather(*(self._page("http", pod.address("metrics"), pod.name) for pod in pods))
        return {pod.name: page for pod, page in zip(pods, pages, strict=True)}

    async def drain(self, pods: Sequence[Pod], worker: str, *, undo: bool = False) -> None:
        """Asks one router after the other to drain the worker, or to take that back, until one has; the worker itself
        tells all the others."""
        refusal: TandemError = WorkerLost("no router is ready")
        for router in (pod for pod in pods if pod.component == "router" and pod.ready):
            try:
                return await self._drain(router, worker, undo=undo)
            except DeadlineExceeded:
                raise  # it is the worker that does not
            except TandemError as error:
                refusal = error  # not connected to the worker, say
        raise refusal

    async def _drain(self, router: Pod, worker: str, *, undo: bool) -> None:
        client = self._client(router)
        request = fleet_pb2.DrainWorkersRequest(workers=[worker])

        def call(channel: grpc.aio.Channel) -> Awaitable[fleet_pb2.DrainedWorkers]:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            method = stub.Undrain if undo else stub.Drain
            return method(request, metadata=client.key, timeout=DRAIN_TIMEOUT_S)

        await client.ask(call)

    async def _router(self, pod: Pod) -> RouterFigures:
        client = self._client(pod)
        page, status = await asyncio.gather(
            self._page("https" if self._tls else "http", pod.address("http"), pod.name),
            client.status(timeout_s=self._timeout_s),
        )
        return RouterFigures(pod.name, page, status)

    def _client(self, router: Pod) -> AsyncTandemClient:
        address = router.address("grpc")
        if not address:
            raise WorkerLost(f"Pod {router.name} has no address for gRPC")
        if address not in self._clients:
            self._clients[address] = AsyncTandemClient([address], api_key=self._api_key, tls=self._tls)
        return self._clients[address]

    async def _page(self, scheme: str, address: str, name: str) -> Page:
        if not address:
            raise WorkerLost(f"Pod {name} has no address for its metrics")
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))
        url = f"{scheme}://{address}/metrics"
        key = {"authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        expected = self._tls.server_name or None if self._tls is not None else None
        try:
            async with self._session.get(url, headers=key, ssl=self._trust or True, server_hostname=expected) as answer:
                if answer.status != 200:
                    raise WorkerLost(f"{name} answers {answer.status} to {url}", status=answer.status)
                return Page.parse(await answer.text())
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            raise WorkerLost(f"{name} does not answer at {url}: {error or type(error).__name__}") from error


async def unless(call: Callable[[], Awaitable[T]], failed: Callable[[TandemError], None]) -> T | None:
    """The call's result; None, after a call of `failed`, if it raises a TandemError."""
    try:
        return await call()
    except TandemError as error:
        failed(error)
        return None
