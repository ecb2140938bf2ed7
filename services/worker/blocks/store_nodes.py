"""The store nodes that this worker knows, and which of them answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from shared.block_service.store_client import StoreClient
from shared.errors import TandemError
from shared.tasks import end_task

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two looks whether a silent node answers again."""


class StoreNodes:
    """Clients by node name. A node that failed once is passed over until a look in the background finds that it
    answers: no request waits for it, and its runs are the next node's by rank meanwhile."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """`addresses` are host:port by name. Owns the clients."""
        self._clients = {name: StoreClient(address) for name, address in addresses.items()}
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._useless: set[str] = set()
        self._closed = False
        self.on_change: Callable[[], None] = _nobody
        """Called when a node fell silent or answers again."""

    @property
    def names(self) -> tuple[str, ...]:
        """All nodes."""
        return tuple(self._clients)

    @property
    def live(self) -> tuple[str, ...]:
        """Those that answer, as far as is known."""
        return tuple(name for name in self._clients if name not in self._looking and name not in self._useless)

    @property
    def silent(self) -> tuple[str, ...]:
        """The others."""
        return tuple(name for name in self._clients if name in self._looking or name in self._useless)

    def client(self, name: str) -> StoreClient:
        """The node's."""
        return self._clients[name]

    def failed(self, name: str, error: TandemError) -> None:
        """A call on a node failed."""
        if self._closed or name in self._looking or name in self._useless:
            return
        logger.warning(
            "store node %s at %s is passed over until it answers: %s", name, self._clients[name].address, error
        )
        self._looking[name] = asyncio.create_task(self._look(name), name=f"look for {name}")
        self.on_change()

    def refused(self, name: str, error: TandemError) -> None:
        """A node cannot take or give this worker's blocks, and never will."""
        if name not in self._useless:
            logger.error("store node %s at %s is of no use: %s", name, self._clients[name].address, error)
            self._useless.add(name)
            self.on_change()

    async def close(self) -> None:
        """Ends looks and connections; twice is fine."""
        self._closed = True
        for task in list(self._looking.values()):
            await end_task(task)
        for client in self._clients.values():
            await client.close()

    async def _look(self, name: str) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                await self._clients[name].look_up(())
            except TandemError:
                continue
            logger.info("store node %s answers again", name)
            del self._looking[name]
            self.on_change()
            return


def _nobody() -> None:
    """Wants to know nothing."""
