"""`POST /v1/cache/close`: nothing is retained for a session any more."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BaseModel, StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from services.router.edge.http.bodies import STRICT, parse_body, read_body
from services.router.edge.http.openai.schemas import session_of_key
from services.router.edge.input_processor import InputProcessor
from services.router.edge.tenants.auth import CALLER, ApiKeys, identified
from shared.errors import InvalidRequest

MAX_BODY_BYTES = 64 * 1024


class CloseRequest(BaseModel):
    """The body."""

    model_config = STRICT

    prompt_cache_key: Annotated[str, StringConstraints(min_length=1)] | None = None
    model: str | None = None


class SessionClosing:
    """The handler. A key closes its own tenant's sessions alone."""

    def __init__(self, input_processor: InputProcessor, keys: ApiKeys) -> None:
        self._input_processor = input_processor
        self._keys = keys

    async def close(self, request: Request) -> Response:
        """The session is that of `prompt_cache_key`, else of `x-session-id`."""
        hints, whose = identified(request.headers, self._keys, request.scope.get(CALLER))
        self._input_processor.rates.begin(whose, hints.tenant)
        asked = parse_body(CloseRequest, await read_body(request.receive, request.headers, MAX_BODY_BYTES))
        self._input_processor.check_model(asked.model or "", hints.tenant)
        session = session_of_key(asked.prompt_cache_key) or hints.session
        if not session:
            raise InvalidRequest(
                "prompt_cache_key is missing, and so is x-session-id: which session is over?", field="prompt_cache_key"
            )
        released = await self._input_processor.close_session(hints.tenant, session)
        body = {"object": "cache.session.closed", "released_blocks": released}
        return Response(json.dumps(body), media_type="application/json")
