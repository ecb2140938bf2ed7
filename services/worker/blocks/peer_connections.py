"""Connections to other workers whose pools may hold a prefix."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict

import grpc

from shared.block_service.client import BlockClient
from shared.errors import TandemError

logger = logging.getLogger(__name__)

MAX_PEERS = 64
"""Most connections; the least recently used one is closed first."""
RETRY_S = 5.0
"""A peer that did not answer is not asked again for this long. Routers name only peers with a live session."""


class Peers:
    """Clients by host:port."""

    def __init__(self, credentials: grpc.ChannelCredentials | None = None, token: str = "") -> None:
        """Opens no connection before `client`; `credentials` and `token` as in `BlockClient`."""
        self._credentials = credentials
        self._token = token
        self._clients: OrderedDict[str, BlockClient] = OrderedDict()
        self._silent_until: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def client(self, address: str) -> BlockClient | None:
        """The peer's client; None while the peer is in back-off after a failure."""
        if time.monotonic() < self._silent_until.get(address, 0.0):
            return None
        self._silent_until.pop(address, None)
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = BlockClient(address, credentials=self._credentials, token=self._token)
            if len(self._clients) > MAX_PEERS:
                self._forget(next(iter(self._clients)))
        self._clients.move_to_end(address)
        return client

    def failed(self, address: str, error: TandemError) -> None:
        """A call on a peer failed."""
        if address not in self._silent_until:
            logger.warning("the worker at %s gives no blocks for now: %s", address, error)
            self._silent_until[address] = time.monotonic() + RETRY_S
            while len(self._silent_until) > MAX_PEERS:
                del self._silent_until[next(iter(self._silent_until))]

    async def close(self) -> None:
        """Ends the connections; twice is fine."""
        for address in list(self._clients):
            self._forget(address)
        if self._closing:
            await asyncio.wait(self._closing)

    def _forget(self, address: str) -> None:
        task = asyncio.create_task(self._clients.pop(address).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
