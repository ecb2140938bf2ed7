"""`GET /metrics` for a process that has no HTTP port of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from shared.errors import ConfigError

logger = logging.getLogger(__name__)


class MetricsServer:
    """The Prometheus client's HTTP server, in threads of its own: a scrape never runs on the event loop.

    `start()` returns when it listens; `close()` is idempotent. Any path gives the page.
    """

    def __init__(self, bind: str, registry: CollectorRegistry) -> None:
        """`bind` is host:port, port 0 = any free port; empty = no server. Raises ConfigError (`metrics`)."""
        self.address = ""
        """host:port, once started; empty if there is no server."""
        self._bind = _parse(bind) if bind else None
        self._registry = registry
        self._server: WSGIServer | None = None

    async def start(self) -> None:
        """Raises ConfigError (`metrics`) if the address is not available."""
        if self._bind is None or self._server is not None:
            return
        host, port = self._bind
        bare = host.removeprefix("[").removesuffix("]")
        try:
            # In a thread: the server resolves its host's name.
            server, _ = await asyncio.to_thread(start_http_server, port, bare, self._registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}",
                field="metrics",
                value=f"{host}:{port}",
            ) from error
        self._server = server
        self.address = f"{host}:{server.server_port}"
        logger.info("metrics on http://%s/metrics", self.address)

    def close(self) -> None:
        """Ends the server in the background, within half a second; a process may exit before that."""
        server, self._server = self._server, None
        if server is not None:
            threading.Thread(target=_end, args=(server,), name="metrics end", daemon=True).start()


def _end(server: WSGIServer) -> None:
    server.shutdown()
    server.server_close()


def _parse(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"metrics must be host:port with a port of 0 to 65535, got {bind!r}", field="metrics")
    return host, int(port)
