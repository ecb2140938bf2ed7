"""`GET`, `DELETE` and `cancel` of kept responses, and the items that came in with them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.router.edge.http.listing import in_order, page, tenant_of
from services.router.edge.http.responses.background import Background
from services.router.edge.http.responses.shelf import Shelf
from services.router.edge.tenants.auth import ApiKeys
from shared.errors import InvalidRequest


class StoredResponses:
    """Handlers."""

    def __init__(self, keys: ApiKeys, shelf: Shelf, background: Background) -> None:
        self._keys = keys
        self._shelf = shelf
        self._background = background

    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        return [
            Route("/v1/responses/{response_id}", self.one, methods=["GET"]),
            Route("/v1/responses/{response_id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/responses/{response_id}/input_items", self.input_items),
        ]

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
        return JSONResponse(page(request, in_order(request, found.input), no_id=""))
