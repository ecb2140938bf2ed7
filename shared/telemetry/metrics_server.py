"""`GET /metrics` for a process that has no HTTP port of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from shared.address import Address
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
        self._bind = Address.parse(bind, "metrics") if bind else None
        self._registry = registry
        self._server: WSGIServer | None = None

    async def start(self) -> None:
        """Raises ConfigError (`metrics`) if the address is not available."""
        if self._bind is None or self._server is not None:
            return
        try:
            # In a thread: the server resolves its host's name.
            server, _ = await asyncio.to_thread(start_http_server, self._bind.port, self._bind.host, self._registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {self._bind}: {error.strerror or error}",
                field="metrics",
                value=str(self._bind),
            ) from error
        self._server = server
        self.address = str(Address(self._bind.host, server.server_port))
        logger.info("metrics on http://%s/metrics", self.address)

    def close(self) -> None:
        """Ends the server in the background, within half a second; a process may exit before that."""
        server, self._server = self._server, None
        if server is not None:
            threading.Thread(target=_end, args=(server,), name="metrics end", daemon=True).start()


def _end(server: WSGIServer) -> None:
    server.shutdown()
    server.server_close()
