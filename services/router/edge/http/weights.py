"""`POST /v1/update_weights`, `/sleep`, `/wake_up` and `GET /is_sleeping`, for administrators; the last three by vLLM's
names."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, StringConstraints
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.router.edge.http.bodies import MAX_SETTING_BYTES, STRICT, parse_body, read_body
from services.router.edge.input_processor import InputProcessor
from services.router.edge.tenants.auth import ApiKeys, credentials
from shared.fingerprints import system_fingerprint

Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class UpdateBody(BaseModel):
    """The body of `POST /v1/update_weights`."""

    model_config = STRICT

    model_path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """Absolute, on each worker's host."""
    timeout_s: float = 0.0
    model: str | None = None


class SleepBody(BaseModel):
    """The body of `POST /sleep`, which may be missing, and of `POST /wake_up`, which has no time-out."""

    model_config = STRICT

    workers: Annotated[list[Name], Field(max_length=10_000)] = []
    timeout_s: float = 0.0
    model: str | None = None


B = TypeVar("B", UpdateBody, SleepBody)


class Weights:
    """The handlers. They ask for an admin key where keys are set."""

    def __init__(self, input_processor: InputProcessor, keys: ApiKeys) -> None:
        self._input_processor = input_processor
        self._keys = keys

    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        return [
            Route("/v1/update_weights", self.update, methods=["POST"]),
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake_up, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping),
        ]

    async def update(self, request: Request) -> Response:
        """Answers once every worker of the model computes with the new weights."""
        asked = await self._body(request, UpdateBody)
        weights = self._input_processor.names.known_weights
        fingerprint, workers = await weights.update(asked.model_path, asked.timeout_s)
        return JSONResponse(
            {
                "success": True,
                "system_fingerprint": system_fingerprint(fingerprint),
                "model_fingerprint": fingerprint,
                "workers": workers,
            }
        )

    async def sleep(self, request: Request) -> Response:
        """Answers once they sleep."""
        asked = await self._body(request, SleepBody)
        weights = self._input_processor.names.known_weights
        return JSONResponse({"workers": await weights.sleep(asked.workers, asked.timeout_s)})

    async def wake_up(self, request: Request) -> Response:
        """Answers once they take requests."""
        asked = await self._body(request, SleepBody)
        return JSONResponse({"workers": await self._input_processor.names.known_weights.wake(asked.workers)})

    async def is_sleeping(self, request: Request) -> Response:
        """Whether any of the model does that the query names, and which."""
        self._keys.check_admin(credentials(request.headers))
        self._input_processor.check_model(request.query_params.get("model", ""), "")
        asleep = self._input_processor.names.known_weights.asleep()
        return JSONResponse({"is_sleeping": bool(asleep), "workers": asleep})

    async def _body(self, request: Request, kind: type[B]) -> B:
        self._keys.check_admin(credentials(request.headers))
        body = await read_body(request.receive, request.headers, MAX_SETTING_BYTES)
        asked = parse_body(kind, body or b"{}")
        self._input_processor.check_model(asked.model or "", "")
        return asked
