"""`POST /v1/cache/close` and `/v1/cache/expect`: a session is over; when a session comes back."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, StringConstraints
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.edge.http.bodies import MAX_SETTING_BYTES, STRICT, parse_body, read_body
from services.router.edge.http.openai.schemas import session_of_key
from services.router.edge.input_processor import InputProcessor
from services.router.edge.scheduling import MAX_NEXT_TURN_S
from services.router.edge.tenants.auth import CALLER, ApiKeys, identified
from shared.errors import InvalidRequest


class CloseRequest(BaseModel):
    """The body that names a session."""

    model_config = STRICT

    prompt_cache_key: Annotated[str, StringConstraints(min_length=1)] | None = None
    model: str | None = None


class ExpectRequest(CloseRequest):
    """The body that says when it comes back."""

    next_turn_s: Annotated[float, Field(ge=0, le=MAX_NEXT_TURN_S)]
    """From now until the session's next request."""


Asked = TypeVar("Asked", bound=CloseRequest)


class SessionCalls:
    """The handlers. A key speaks for its own tenant's sessions alone."""

    def __init__(self, input_processor: InputProcessor, keys: ApiKeys) -> None:
        self._input_processor = input_processor
        self._keys = keys

    async def close(self, request: Request) -> Response:
        """Nothing is retained for the session any more."""
        _, tenant, session = await self._named(request, CloseRequest)
        released = await self._input_processor.close_session(tenant, session)
        return JSONResponse({"object": "cache.session.closed", "released_blocks": released})

    async def expect(self, request: Request) -> Response:
        """What is retained for sessions that come back later than this one is evicted first."""
        asked, tenant, session = await self._named(request, ExpectRequest)
        self._input_processor.expect_session(tenant, session, asked.next_turn_s)
        return JSONResponse({"object": "cache.session.expected", "next_turn_s": asked.next_turn_s})

    async def _named(self, request: Request, schema: type[Asked]) -> tuple[Asked, str, str]:
        """Body, tenant and session, which is that of `prompt_cache_key`, else of `x-session-id`."""
        hints, whose = identified(request.headers, self._keys, request.scope.get(CALLER))
        self._input_processor.rates.begin(whose, hints.tenant)
        asked = parse_body(schema, await read_body(request.receive, request.headers, MAX_SETTING_BYTES))
        self._input_processor.check_model(asked.model or "", hints.tenant)
        session = session_of_key(asked.prompt_cache_key) or hints.session
        if not session:
            raise InvalidRequest(
                "prompt_cache_key is missing, and so is x-session-id: which session is it?", field="prompt_cache_key"
            )
        return asked, hints.tenant, session
