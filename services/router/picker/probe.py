"""One look at a router's /readyz: in a thread, since there are few routers and seconds between two looks."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

from services.router.picker.router_order import Endpoint
from shared.address import Address
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
    """For routers whose HTTP API speaks TLS. Their certificates are not verified: routers are addressed by IP, and
    nothing secret is sent or believed."""
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
