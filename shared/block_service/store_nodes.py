"""The store nodes by name, and which of them are alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from shared.block_service.client import BlockClient
from shared.block_service.store_client import StoreClient
from shared.errors import TandemError
from shared.tasks import end_task

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Time between two probes of a node that does not answer."""

T = TypeVar("T")
ClientT = TypeVar("ClientT", bound=BlockClient)


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """One node's answer, or the error in its place."""

    name: str
    address: str
    value: T | None
    error: TandemError | None = None


class StoreNodes:
    """A client for each store node.

    Requests use the `live` nodes. After a failed call (`failed`) a node is left out until a background probe finds that
    it answers: no request waits for it, and meanwhile the next node by rendezvous rank keeps its blocks. `ask_all` is
    for administrators: it asks the silent nodes too and changes nothing.
    """

    def __init__(
        self, addresses: Mapping[str, str], credentials: grpc.ChannelCredentials | None = None, token: str = ""
    ) -> None:
        """`addresses` are host:port by name; all workers and routers must use the same names. Owns the clients, which
        connect on first use; `credentials` and `token` as theirs."""
        self._clients = {
            name: StoreClient(address, credentials=credentials, token=token) for name, address in addresses.items()
        }
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._refused: set[str] = set()
        self._closed = False
        self.on_change: Callable[[], None] = _ignore
        """Called after `live` has changed."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return tuple(self._clients)

    @property
    def live(self) -> tuple[str, ...]:
        """The nodes that answered the last call or probe."""
        return tuple(name for name in self._clients if not self._is_silent(name))

    @property
    def silent(self) -> tuple[str, ...]:
        """The nodes that are not live."""
        return tuple(name for name in self._clients if self._is_silent(name))

    def client(self, name: str) -> StoreClient:
        """The node's client; the registry owns it."""
        return self._clients[name]

    def failed(self, name: str, error: TandemError) -> None:
        """A call to the node failed: it is silent until a probe succeeds."""
        if self._closed or self._is_silent(name):
            return
        logger.warning("store node %s at %s is left out until it answers: %s", name, self._clients[name].address, error)
        self._probes[name] = asyncio.create_task(self._probe(name), name=f"probe of {name}")
        self.on_change()

    def refused(self, name: str, error: TandemError) -> None:
        """The node can never exchange blocks with this worker (for instance another layout): it stays silent."""
        if name not in self._refused:
            logger.error("store node %s at %s refuses this worker's blocks: %s", name, self.client(name).address, error)
            self._refused.add(name)
            self.on_change()

    async def ask_all(
        self, call: Callable[[str, StoreClient], Awaitable[T]], among: Collection[str] | None = None
    ) -> list[Answer[T]]:
        """The answers of all nodes, or of those in `among`, asked at the same time. A node's TandemError is its answer
        and is not raised."""
        return await ask_all(
            {name: client for name, client in self._clients.items() if among is None or name in among}, call
        )

    async def close(self) -> None:
        """Ends probes and connections; idempotent."""
        self._closed = True
        for task in list(self._probes.values()):
            await end_task(task)
        for client in self._clients.values():
            await client.close()

    def _is_silent(self, name: str) -> bool:
        return name in self._probes or name in self._refused

    async def _probe(self, name: str) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                await self._clients[name].look_up(())
            except TandemError:
                continue
            logger.info("store node %s answers again", name)
            del self._probes[name]
            self.on_change()
            return


async def ask_all(clients: Mapping[str, ClientT], call: Callable[[str, ClientT], Awaitable[T]]) -> list[Answer[T]]:
    """The answers of all holders of blocks, in the order of `clients`, asked concurrently; a TandemError of one is
    its answer and is not raised."""

    async def ask(name: str, client: ClientT) -> Answer[T]:
        try:
            return Answer(name, client.address, await call(name, client))
        except TandemError as error:
            return Answer(name, client.address, None, error)

    return await asyncio.gather(*(ask(name, client) for name, client in clients.items()))


def _ignore() -> None:
    """The default `on_change`."""
