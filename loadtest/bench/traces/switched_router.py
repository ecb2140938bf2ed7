"""`python -m loadtest.bench.traces.switched_router --switch=SOCKET …`: a router that traces as much as it is told to.

The same process with and without traces: what two processes cost differs by several percent whatever they do. It
listens on the Unix socket SOCKET; a line is the share of requests that are sampled from now on, or `none` for a router
without a collector. It answers each with an empty line. Further flags, and the rest, are the router's own.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from services.router.service import RouterService
from services.router.settings import RouterSettings
from services.router.traces.call_trace import CallTraces
from shared.process import run_service

FLAG = "--switch="
NONE = "none"
_ROUTER = "services.router"


class SwitchedRouter(RouterService):
    """A router with a collector."""

    def __init__(self, settings: RouterSettings, socket: Path) -> None:
        super().__init__(settings)
        self._socket = socket
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """As the router; listens on the socket before it is ready."""
        await super().start()
        self._server = await asyncio.start_unix_server(self._serve, self._socket)

    async def close(self) -> None:
        """As the router."""
        if self._server is not None:
            self._server.close()
        await super().close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            traces = self._traces(line.decode().strip())
            for model in self._models:
                model.edge.traces = traces
            writer.write(b"\n")
        writer.close()

    def _traces(self, share: str) -> CallTraces:
        if share == NONE:
            return CallTraces()
        settings = self._settings.traces.model_copy(update={"sample": float(share)})
        return CallTraces(self._tracer, settings, self._store.keep_trace if self._store is not None else None)


def switched(command: Sequence[str], socket: Path) -> Sequence[str]:
    """The command of a router (`… -m services.router …`), with this module in its place."""
    place = command.index(_ROUTER)
    return [*command[:place], Switch.ROUTER, f"{FLAG}{socket}", *command[place + 1 :]]


class Switch:
    """The benchmark's side."""

    ROUTER = "loadtest.bench.traces.switched_router"
    """What takes the place of the router's own module."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, socket: Path) -> Switch:
        """Of a router that is ready."""
        return cls(*await asyncio.open_unix_connection(socket))

    async def set(self, sample: float | None) -> None:
        """From now on this share of the requests is sampled; None: no collector."""
        self._writer.write(f"{NONE if sample is None else sample}\n".encode())
        await self._reader.readline()

    def close(self) -> None:
        """The router keeps the last share."""
        self._writer.close()


if __name__ == "__main__":
    [socket] = [argument.removeprefix(FLAG) for argument in sys.argv if argument.startswith(FLAG)]
    sys.argv = [argument for argument in sys.argv if not argument.startswith(FLAG)]

    async def _start(settings: RouterSettings) -> SwitchedRouter:
        service = SwitchedRouter(settings, Path(socket))
        await service.start()
        return service

    sys.exit(run_service("tandem-router", RouterSettings, _start))
