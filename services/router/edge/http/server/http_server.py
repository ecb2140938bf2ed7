"""The HTTP server, in this process and on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from services.router.edge.http.server.protocol import BoundedProtocol, Connections
from services.router.edge.limits import LimitSettings
from shared.address import Address
from shared.errors import ConfigError
from shared.rpc.tls import Tls

_BACKLOG = 2048
_KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """Uvicorn that leaves the process's signals alone and reports when it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The service's main decides what a signal means."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's own, announced."""
        await super().startup(sockets)
        self.serving.set()


class HttpServer:
    """Serves one ASGI application. `start()` returns once it serves; `stop()` twice is fine."""

    def __init__(
        self,
        bind: str,
        app: ASGIApp,
        limits: LimitSettings | None = None,
        tls: Tls | None = None,
        refused: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`bind` is host:port ([host]:port for IPv6), port 0 = any free one. `refused` gets the status of an answer
        to what never became a request: no HTTP, too large a head, too many connections."""
        self._refused = refused
        self._bind = bind
        self._limits = limits or LimitSettings()
        self._tls = tls or Tls()
        self._app = app
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.address = ""
        """host:port that the server listens on, once started."""

    async def start(self) -> None:
        """Listens and serves; raises ConfigError (`http`) when the port is taken or the host unknown."""
        listener = _listen(self._bind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._limits.send_buffer_bytes)
        protocol = functools.partial(
            BoundedProtocol, limits=self._limits, open_connections=Connections(self._limits), refused=self._refused
        )
        config = uvicorn.Config(
            self._app,
            http=protocol,  # type: ignore[arg-type]  # any callable that makes one
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ssl_context_factory=(lambda *_: self._tls.server_context()) if self._tls.enabled else None,
        )
        self._server = server = _Server(config)
        self._task = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
        self._task.add_done_callback(lambda _: server.serving.set())
        await server.serving.wait()
        if self._task.done():
            await self._task
        self.address = str(replace(Address.parse(self._bind, "http"), port=listener.getsockname()[1]))

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new connections, gives running requests `grace_s` seconds, then ends them with an error."""
        server, self._server = self._server, None
        if server is None or self._task is None:
            return
        server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        server.should_exit = True
        await self._task
        # Those that were cut off still send their last words.
        if server.server_state.tasks:
            await asyncio.wait(set(server.server_state.tasks))


def _listen(bind: str) -> socket.socket:
    address = Address.parse(bind, "http")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {bind}: {error.strerror or error}", field="http", value=bind) from error
