"""The page at `/`, and the live data that it and `tandem top` show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.router.edge.scheduling import number_of
from services.router.edge.tenants.auth import ApiKeys, credentials
from services.router.views.cluster_view import ClusterView
from shared.errors import InvalidRequest, NotFound

PAGE = Path(__file__).parents[3] / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: the page's own files, and nothing inline."""
_PAGE_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_DATA_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class LivePages:
    """`/` and its files are open, for they hold no data; what they show asks for an API key where any is set."""

    def __init__(self, keys: ApiKeys, view: ClusterView) -> None:
        """Reads the page's files."""
        self._keys = keys
        self._view = view
        self._files = {path.name: path.read_bytes() for path in sorted(PAGE.iterdir()) if path.suffix in TYPES}

    def routes(self) -> list[Route]:
        """The routes of these pages."""
        return [
            Route("/", self.page),
            Route("/page/{name}", self.asset),
            Route("/status", self.status),
            Route("/status/requests", self.requests),
            Route("/status/requests/{request_id:path}", self.request),
        ]

    async def page(self, _: Request) -> Response:
        """`GET /`."""
        return self._file("index.html")

    async def asset(self, request: Request) -> Response:
        """`GET /page/{name}`: one of the page's files."""
        return self._file(request.path_params["name"])

    async def status(self, request: Request) -> Response:
        """`GET /status?window_s=60`: the cluster's state as protobuf's JSON, all fields present (64-bit numbers are
        strings there)."""
        self._keys.check(credentials(request.headers))
        return _json(_fields(self._view.status(_window(request.query_params.get("window_s", "")))))

    async def requests(self, request: Request) -> Response:
        """`GET /status/requests`: running and ended ones; to a tenant's key its own."""
        tenant = self._keys.check(credentials(request.headers))
        return _json({"requests": [dataclasses.asdict(row) for row in self._view.requests(tenant)]})

    async def request(self, request: Request) -> Response:
        """`GET /status/requests/{id}`: one request's split and placements."""
        tenant = self._keys.check(credentials(request.headers))
        found = self._view.request(request.path_params["request_id"], tenant)
        explanation = None if found.explanation is None else _fields(found.explanation)
        return _json(
            {
                "request": dataclasses.asdict(found.row),
                "ttft_split_ms": found.split,
                "parts_ms": found.parts,
                "explanation": explanation,
            }
        )

    def _file(self, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise NotFound(f"the page has no file {name!r}", field="name", value=name)
        return Response(content, media_type=TYPES[Path(name).suffix], headers=_PAGE_HEADERS)


def _window(text: str) -> float:
    if not text:
        return 0.0
    value = number_of(text)
    if not value > 0.0:
        raise InvalidRequest(f"window_s must be a number of seconds, got {text[:40]!r}", field="window_s")
    return value


def _fields(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _json(content: Mapping[str, Any]) -> Response:
    return Response(json.dumps(content), media_type="application/json", headers=_DATA_HEADERS)
