"""`GET /metrics`, `/healthz` and `/readyz` for a process that has no HTTP port of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterable
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

from shared.address import Address
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 3.0
"""An event loop that runs nothing for this long does not count as alive."""


class MetricsServer:
    """The Prometheus client's HTTP server, in threads of its own: a scrape never runs on the event loop.

    `start()` returns when it listens; `close()` is idempotent. `/healthz` is 200 while the event loop runs, `/readyz`
    while the service serves, else 503 with the reason; any other path gives the metrics.
    """

    def __init__(self, bind: str, registry: CollectorRegistry, not_ready_reason: Callable[[], str]) -> None:
        """`bind` is host:port, port 0 = any free port; empty = no server. `not_ready_reason` is called from other
        threads; empty = ready. Raises ConfigError (`metrics`)."""
        self.address = ""
        """host:port, once started; empty if there is no server."""
        self._bind = Address.parse(bind, "metrics") if bind else None
        self._registry = registry
        self._not_ready_reason = not_ready_reason
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
        server.set_app(_with_probes(make_wsgi_app(self._registry), asyncio.get_running_loop(), self._not_ready_reason))
        self._server = server
        self.address = str(Address(self._bind.host, server.server_port))
        logger.info("metrics on http://%s/metrics", self.address)

    def close(self) -> None:
        """Ends the server in the background, within half a second; a process may exit before that."""
        server, self._server = self._server, None
        if server is not None:
            threading.Thread(target=_end, args=(server,), name="metrics end", daemon=True).start()


def _with_probes(
    metrics: WSGIApplication, loop: asyncio.AbstractEventLoop, not_ready_reason: Callable[[], str]
) -> WSGIApplication:
    """The application that answers the two probes itself and gives the rest to `metrics`."""

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/healthz":
            reason = "" if _runs(loop) else f"the event loop ran nothing for {HEALTH_TIMEOUT_S:g} s"
            return _answer(start_response, {"status": reason or "ok"}, ok=not reason)
        if path == "/readyz":
            reason = not_ready_reason()
            return _answer(start_response, {"ready": not reason, "reason": reason}, ok=not reason)
        return metrics(environ, start_response)

    return application


def _runs(loop: asyncio.AbstractEventLoop) -> bool:
    ran = threading.Event()
    try:
        loop.call_soon_threadsafe(ran.set)
    except RuntimeError:  # the loop is closed
        return False
    return ran.wait(HEALTH_TIMEOUT_S)


def _answer(start_response: StartResponse, content: dict[str, object], *, ok: bool) -> Iterable[bytes]:
    body = json.dumps(content).encode()
    start_response(
        "200 OK" if ok else "503 Service Unavailable",
        [("Content-Type", "application/json"), ("Content-Length", str(len(body)))],
    )
    return [body]


def _end(server: WSGIServer) -> None:
    server.shutdown()
    server.server_close()
