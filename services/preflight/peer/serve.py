"""The side that listens: `tandem preflight --serve host:port`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from services.preflight.peer.block_transfer import BlockBatch
from services.preflight.peer.wire import MAX_COUNT, MAX_LINE_BYTES, Line, address_in, field
from services.preflight.ucx_resources import version
from shared.address import Address
from shared.errors import ConfigError, TandemError, TransferFailed
from shared.kv.fleet_key import FleetKey
from shared.kv.transfer import TICKET_BITS
from shared.kv.ucx import UcxTransfer

MAX_VISITORS = 8
"""Connections at once; they are served one after the other, so that none takes another's bandwidth."""


class PreflightServer:
    """`start()` returns when it listens; `close()` ends everything. In a fleet with a key it moves blocks with holders
    of the key alone."""

    def __init__(self, bind: str, fleet_key: str, on_visit: Callable[[str], None]) -> None:
        """`on_visit` is called with a line of text about each visitor. Raises ConfigError for an address that is
        none."""
        self._bind = Address.parse(bind, "serve")
        self._transfer = UcxTransfer(fleet_key=FleetKey.of(fleet_key))
        self._on_visit = on_visit
        self._one_by_one = asyncio.Lock()
        self._visitors: set[asyncio.Task[None]] = set()
        self._batch: BlockBatch
        self._server: asyncio.Server | None = None
        self.address = ""
        """host:port, once started."""

    async def start(self) -> None:
        """Raises ConfigError where the port is taken, TransferFailed without UCX."""
        await self._transfer.start()
        self._batch = BlockBatch(self._transfer)
        try:
            self._server = await asyncio.start_server(
                self._visit, self._bind.host, self._bind.port, limit=MAX_LINE_BYTES
            )
        except OSError as error:
            await self._transfer.close()
            raise ConfigError(f"cannot listen on {self._bind}: {error.strerror}", field="serve") from error
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = str(Address(host, port))

    async def close(self) -> None:
        """Ends visits under way; twice is fine."""
        if self._server is None:
            return
        self._server.close()
        for visitor in list(self._visitors):
            visitor.cancel()
        await asyncio.gather(*self._visitors, return_exceptions=True)
        self._server = None
        await self._transfer.close()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._visitors.add(task)
        line = Line(reader, writer)
        who = str(writer.get_extra_info("peername")[0])
        try:
            if len(self._visitors) > MAX_VISITORS:
                await line.send(error=f"{MAX_VISITORS} others are being measured")
                return
            async with self._one_by_one:
                await self._serve(line, who)
        except TandemError as error:
            self._on_visit(f"{who}: {error.message}")
            await self._tell(line, error)
        finally:
            self._visitors.discard(task)
            line.close()

    async def _serve(self, line: Line, who: str) -> None:
        """Answers until the visitor leaves. Raises TransferFailed."""
        address = b""
        while True:
            message = await line.read()
            match message.get("op"):
                case "hello":
                    address = address_in(message)
                    await line.send(time=time.time(), address=self._transfer.address.hex(), version=version())
                case "time":
                    await line.send(time=time.time())
                case "receive":
                    await self._receive(line, message)
                case "send":
                    await self._send(line, message, address)
                case "bye":
                    self._on_visit(f"{who}: measured")
                    return
                case other:
                    raise TransferFailed(f"there is no op {other!r}")

    async def _receive(self, line: Line, message: dict[str, Any]) -> None:
        ticket, count = _batch_of(message)
        incoming = self._batch.expect(ticket, count)
        arriving = asyncio.ensure_future(self._batch.finish(incoming, ticket, count))
        await line.send(ready=True)
        await _unless_gone(line, arriving, arriving.cancel)
        await line.send(done=True)

    async def _send(self, line: Line, message: dict[str, Any], address: bytes) -> None:
        ticket, count = _batch_of(message)
        leaving = asyncio.ensure_future(self._batch.send(address, ticket, count))
        await _unless_gone(line, leaving, lambda: self._transfer.drop_peer(address))  # a send must not be cancelled
        await line.send(done=True)

    async def _tell(self, line: Line, error: TandemError) -> None:
        try:
            await line.send(error=error.message)
        except TransferFailed:
            return


async def _unless_gone(line: Line, moving: asyncio.Future[None], stop: Callable[[], object]) -> None:
    """Returns when `moving` has ended; `stop` ends it where the visitor leaves before. Raises TransferFailed."""
    gone = asyncio.ensure_future(line.read())
    try:
        await asyncio.wait((moving, gone), return_when=asyncio.FIRST_COMPLETED)
        if not moving.done():
            stop()
    finally:
        gone.cancel()
        results = await asyncio.gather(moving, gone, return_exceptions=True)
    moved = results[0]
    if isinstance(moved, asyncio.CancelledError):
        raise TransferFailed("the visitor left before all blocks had come")
    if isinstance(moved, BaseException):
        raise moved


def _batch_of(message: dict[str, Any]) -> tuple[int, int]:
    return field(message, "ticket", (1 << TICKET_BITS) - 1), field(message, "count", MAX_COUNT)
