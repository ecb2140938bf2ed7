"""The routers, followed by name and by probes."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from services.router.picker.router_order import Endpoint
from shared.address import Address
from shared.errors import ConfigError
from shared.rpc.tls import Tls

TIMEOUT_S = 2.0
_MAX_PAGE_BYTES = 1 << 20


def probe(address: Address, context: ssl.SSLContext | None) -> Endpoint:
    """What the router says of itself; not ready where it does not answer within TIMEOUT_S. Blocking."""
    try:
        page = _get(address, context)
        waiting, running, limit = (int(page["load"][name]) for name in ("waiting", "running", "queue_limit"))
        return Endpoint(str(address), bool(page["ready"]), full=waiting >= limit, load=waiting + running)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return Endpoint(str(address), ready=False, full=False, load=0)


def tls_context(edge: Tls) -> ssl.SSLContext | None:
    """The context for routers whose HTTP API speaks TLS. Their certificates are not verified: routers are addressed by
    IP, and nothing secret is sent or believed."""
    if edge.cert is None or edge.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if edge.ca is not None:
        context.load_cert_chain(edge.cert, edge.key)
    return context


def _get(address: Address, context: ssl.SSLContext | None) -> dict[str, Any]:
    if context is None:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
    else:
        connection = http.client.HTTPSConnection(address.host, address.port, timeout=TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/readyz", headers={"connection": "close"})
        page = json.loads(connection.getresponse().read(_MAX_PAGE_BYTES))
    finally:
        connection.close()
    if not isinstance(page, dict):
        raise TypeError("a page of another service")
    return page


logger = logging.getLogger(__name__)


class EndpointWatch:
    """Looks at all routers again and again. A name that cannot be resolved keeps the addresses that it last had."""

    def __init__(self, addresses: Sequence[Address], interval_s: float, context: ssl.SSLContext | None) -> None:
        """`context`: where the routers' HTTP APIs speak TLS."""
        self._names = tuple(addresses)
        self._interval_s = interval_s
        self._context = context
        self._resolved: dict[Address, list[Address]] = {}
        self._unresolved: set[Address] = set()
        self._task: asyncio.Task[None] | None = None
        self.endpoints: list[Endpoint] = []
        self.looked = asyncio.Event()
        """Set once all routers have been probed."""

    @classmethod
    def of(cls, text: str, interval_s: float, context: ssl.SSLContext | None) -> EndpointWatch:
        """`text`: host:port, comma-separated. Raises ConfigError (`picker.endpoints`)."""
        entries = [part.strip() for part in text.split(",") if part.strip()]
        if not entries:
            raise ConfigError(
                "picker.endpoints must name the routers' HTTP APIs where picker.bind is set", field="picker.endpoints"
            )
        return cls([Address.parse(entry, "picker.endpoints", min_port=1) for entry in entries], interval_s, context)

    def start(self) -> None:
        """Begins to look; returns at once."""
        self._task = asyncio.create_task(self._run(), name="picker-endpoints")

    async def close(self) -> None:
        """Ends it; twice is fine."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            addresses = dict.fromkeys([each for name in self._names for each in await self._resolve(name)])
            found = await asyncio.gather(*(asyncio.to_thread(probe, address, self._context) for address in addresses))
            self.endpoints = list(found)
            self.looked.set()
            await asyncio.sleep(self._interval_s)

    async def _resolve(self, name: Address) -> list[Address]:
        """All IP addresses of a name; those of the last time where it has none now."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
        except OSError as error:
            if name not in self._unresolved:
                logger.warning("the name %s of picker.endpoints cannot be resolved: %s", name.host, error)
            self._unresolved.add(name)
        else:
            self._unresolved.discard(name)
            self._resolved[name] = [Address(str(place[0]), name.port) for *_, place in found]
        return self._resolved.get(name, [])
