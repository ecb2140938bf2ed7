"""`/v1/conversations`: items that belong together, which responses read and add to."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.router.edge.http.bodies import STRICT, check_json_size, parse_body, read_body
from services.router.edge.http.listing import in_order, page, tenant_of
from services.router.edge.http.openai.schemas import MAX_METADATA
from services.router.edge.http.openai.unsupported import refuse_extra
from services.router.edge.http.responses.inner import item_messages
from services.router.edge.http.responses.items import kept_items
from services.router.edge.http.responses.schemas import InputItem
from services.router.edge.http.responses.shelf import Conversation, Item, Shelf
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys
from shared.errors import NotFound, brief

MAX_ITEMS = 20
"""Most items of one call."""
Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA)]
Items = Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_ITEMS)]
B = TypeVar("B", bound=BaseModel)


class ConversationRequest(BaseModel):
    """The body of `POST /v1/conversations`."""

    model_config = STRICT

    items: Items | None = None
    metadata: Metadata | None = None


class ConversationUpdate(BaseModel):
    """The body of `POST /v1/conversations/{conversation_id}`."""

    model_config = STRICT

    metadata: Metadata


class ItemsRequest(BaseModel):
    """The body of `POST /v1/conversations/{conversation_id}/items`."""

    model_config = STRICT

    items: Annotated[Items, Field(min_length=1)]


class Conversations:
    """Handlers."""

    def __init__(self, keys: ApiKeys, shelf: Shelf, settings: EdgeSettings) -> None:
        self._keys = keys
        self._shelf = shelf
        self._settings = settings

    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        one = "/v1/conversations/{conversation_id}"
        return [
            Route("/v1/conversations", self.create, methods=["POST"]),
            Route(one, self.one, methods=["GET"]),
            Route(one, self.update, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/items", self.items, methods=["GET"]),
            Route(f"{one}/items", self.add, methods=["POST"]),
            Route(f"{one}/items/{{item_id}}", self.item, methods=["GET"]),
            Route(f"{one}/items/{{item_id}}", self.delete_item, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        """`POST /v1/conversations`."""
        tenant = tenant_of(request, self._keys)
        asked = await self._body(request, ConversationRequest)
        begun = await self._shelf.begin(tenant, _checked(asked.items or []), asked.metadata or {})
        return JSONResponse(begun.body)

    async def one(self, request: Request) -> Response:
        """`GET /v1/conversations/{id}`."""
        return JSONResponse((await self._found(request)).body)

    async def update(self, request: Request) -> Response:
        """`POST /v1/conversations/{id}`: other metadata."""
        tenant = tenant_of(request, self._keys)
        asked = await self._body(request, ConversationUpdate)
        changed = await self._shelf.change(
            tenant, _id(request), lambda conversation: replace(conversation, metadata=asked.metadata)
        )
        return JSONResponse(changed.body)

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/conversations/{id}`, with its items."""
        await self._shelf.end(tenant_of(request, self._keys), _id(request))
        return JSONResponse({"id": _id(request), "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request) -> Response:
        """`GET /v1/conversations/{id}/items`, as pages."""
        items = (await self._found(request)).items
        return JSONResponse(page(request, in_order(request, items), no_id=""))

    async def add(self, request: Request) -> Response:
        """`POST /v1/conversations/{id}/items`."""
        tenant = tenant_of(request, self._keys)
        added = _checked((await self._body(request, ItemsRequest)).items)
        await self._shelf.change(tenant, _id(request), lambda conversation: with_items(conversation, added))
        ends = {"first_id": added[0]["id"], "last_id": added[-1]["id"]}
        return JSONResponse({"object": "list", "data": added, **ends, "has_more": False})

    async def item(self, request: Request) -> Response:
        """`GET /v1/conversations/{id}/items/{item_id}`."""
        return JSONResponse(_item(await self._found(request), request.path_params["item_id"]))

    async def delete_item(self, request: Request) -> Response:
        """`DELETE /v1/conversations/{id}/items/{item_id}`; answers with the conversation."""
        item_id = request.path_params["item_id"]

        def without(conversation: Conversation) -> Conversation:
            gone = _item(conversation, item_id)
            return replace(conversation, items=[item for item in conversation.items if item is not gone])

        changed = await self._shelf.change(tenant_of(request, self._keys), _id(request), without)
        return JSONResponse(changed.body)

    async def _found(self, request: Request) -> Conversation:
        return await self._shelf.conversation(tenant_of(request, self._keys), _id(request))

    async def _body(self, request: Request, kind: type[B]) -> B:
        body = await read_body(request.receive, request.headers, self._settings.max_body_bytes)
        await check_json_size(body, self._settings.limits, 0)
        asked = parse_body(kind, body or b"{}")
        refuse_extra(asked, {})
        return asked


def with_items(conversation: Conversation, added: list[Item]) -> Conversation:
    """The conversation with these at its end."""
    return replace(conversation, items=[*conversation.items, *added])


def _checked(items: list[InputItem]) -> list[Item]:
    """The items in the form in which they are kept. Raises InvalidRequest (`items`) for what no response could read."""
    item_messages(items, "items")
    return kept_items(items)


def _id(request: Request) -> str:
    found: str = request.path_params["conversation_id"]
    return found


def _item(conversation: Conversation, item_id: str) -> Item:
    found = next((item for item in conversation.items if item["id"] == item_id), None)
    if found is None:
        raise NotFound(f"the conversation has no item {brief(item_id, 100)!r}", field="item_id")
    return found
