"""`GET`, `DELETE` and `cancel` of kept responses, and the items that came in with them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.edge.http.responses.background import Background
from services.router.edge.http.responses.shelf import Item, Shelf
from services.router.edge.scheduling import scheduling_hints
from services.router.edge.tenants.auth import ApiKeys, credentials
from shared.errors import InvalidRequest, brief

MAX_PAGE = 100


def tenant_of(request: Request, keys: ApiKeys) -> str:
    """Whose things the request is about; raises Unauthenticated, and InvalidRequest for a header."""
    return scheduling_hints(request.headers, keys.check(credentials(request.headers))).tenant


class StoredResponses:
    """Handlers."""

    def __init__(self, keys: ApiKeys, shelf: Shelf, background: Background) -> None:
        self._keys = keys
        self._shelf = shelf
        self._background = background

    async def one(self, request: Request) -> Response:
        """`GET /v1/responses/{id}`."""
        for name in ("stream", "starting_after"):
            if request.query_params.get(name, "false") != "false":
                raise InvalidRequest(f"{name}: a kept response is not streamed", field=name)
        found = await self._background.look(tenant_of(request, self._keys), request.path_params["response_id"])
        return JSONResponse(found.body)

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/responses/{id}`; one that runs is cancelled first."""
        tenant, response_id = tenant_of(request, self._keys), request.path_params["response_id"]
        if (await self._shelf.response(tenant, response_id)).is_running:
            await self._background.cancel(tenant, response_id)
        await self._shelf.drop(tenant, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """`POST /v1/responses/{id}/cancel`."""
        found = await self._background.cancel(tenant_of(request, self._keys), request.path_params["response_id"])
        return JSONResponse(found.body)

    async def input_items(self, request: Request) -> Response:
        """`GET /v1/responses/{id}/input_items`: those of the call itself, as pages."""
        found = await self._shelf.response(tenant_of(request, self._keys), request.path_params["response_id"])
        return JSONResponse(page(request, found.input))


def page(request: Request, items: Sequence[Item]) -> dict[str, object]:
    """A page of items as the query asks for it: `limit`, `order` (the newest first by default), `after` an id."""
    limit = request.query_params.get("limit", "20")
    if not (limit.isascii() and limit.isdecimal()) or not 1 <= int(limit[:8]) <= MAX_PAGE:
        raise InvalidRequest(f"limit must be from 1 to {MAX_PAGE}", field="limit", limit=MAX_PAGE)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = request.query_params.get("after")
    if after is not None:
        place = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest(f"after: there is no {brief(after, 100)!r} in this list", field="after")
        ordered = ordered[place + 1 :]
    data = ordered[: int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": len(ordered) > len(data),
    }
