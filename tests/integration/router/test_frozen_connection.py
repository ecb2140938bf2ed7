"""The last of three detectors: gRPC's own pings, towards a worker that sends no heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

from services.router.workers.discovery import StaticDiscovery
from shared.rpc import server
from shared.rpc.server import KEEPALIVE_MS
from tests.integration.router.router_under_test import Router, decode_worker
from tests.waiting import until

PING_TIMEOUT_MS = 1_500


class Relay:
    """Forwards TCP until it is frozen: neither side sees an end, nor an answer."""

    def __init__(self, address: str) -> None:
        self._host, port = address.split(":")
        self._port = int(port)
        self._moving = asyncio.Event()
        self._moving.set()
        self._links: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def freeze(self) -> None:
        self._moving.clear()

    async def stop(self) -> None:
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links)

    async def _serve(self, reader, writer) -> None:
        self._links.add(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(far_writer):
                await asyncio.gather(self._move(reader, far_writer), self._move(far_reader, writer))

    async def _move(self, reader, writer) -> None:
        while data := await reader.read(65536):
            await self._moving.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


class RelayedRouter(Router):
    """Reaches its decode workers over a relay."""

    def _discovery(self):
        found = super()._discovery()
        return StaticDiscovery(replace(worker, address=self.relay_address) for worker in found.workers)


async def test_a_connection_that_is_frozen_ends_by_its_pings(monkeypatch):
    for name in ("CHANNEL_OPTIONS", "SERVER_OPTIONS"):
        options = getattr(server, name)
        assert sum(value == server.PING_TIMEOUT_MS for _, value in options) == 2
        shorter = ((key, PING_TIMEOUT_MS if value == server.PING_TIMEOUT_MS else value) for key, value in options)
        monkeypatch.setattr(server, name, tuple(shorter))
    decode = decode_worker()
    await decode.start()
    relay = Relay(decode.address)
    router = RelayedRouter([], [decode])
    router.relay_address = await relay.start()
    await decode.stop()  # `async with` starts it again, on the same port
    async with router:
        began = time.monotonic()
        relay.freeze()
        await until(lambda: not router.fleet.decodes["d0"].connected)
        assert time.monotonic() - began < 10 * (KEEPALIVE_MS + PING_TIMEOUT_MS) / 1e3
    await relay.stop()
