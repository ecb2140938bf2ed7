"""Tenant, order and pages of what lists over HTTP show: files, batches, items of responses and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from services.router.edge.scheduling import scheduling_hints
from services.router.edge.tenants.auth import ApiKeys, credentials
from shared.errors import InvalidRequest, brief

MAX_PAGE = 100
T = TypeVar("T")


def tenant_of(request: Request, keys: ApiKeys) -> str:
    """The tenant whose things the request is about. Raises Unauthenticated, and InvalidRequest for a header."""
    return scheduling_hints(request.headers, keys.check(credentials(request.headers))).tenant


def in_order(request: Request, items: Sequence[T]) -> list[T]:
    """`items`, given oldest first, in the query's `order`, by default newest first. Raises InvalidRequest (`order`)."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    return list(items) if order == "asc" else list(reversed(items))


def page(
    request: Request,
    items: Sequence[Mapping[str, Any]],
    *,
    most: int = MAX_PAGE,
    default: int = 20,
    no_id: str | None = None,
) -> dict[str, object]:
    """The page of ordered items that the query asks for: `limit` items, behind the one of id `after`. `most` bounds
    `limit`, `default` is its default, and `no_id` is what an empty page has for ids. Raises InvalidRequest naming the
    parameter."""
    limit = request.query_params.get("limit", str(default))
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 8) or not 1 <= int(limit) <= most:
        raise InvalidRequest(f"limit must be from 1 to {most}", field="limit", limit=most)
    after = request.query_params.get("after")
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest(f"after: there is no {brief(after, 100)!r} in this list", field="after")
        items = items[place + 1 :]
    data = list(items[: int(limit)])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else no_id,
        "last_id": data[-1]["id"] if data else no_id,
        "has_more": len(items) > len(data),
    }
