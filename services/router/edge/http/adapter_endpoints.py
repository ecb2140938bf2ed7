"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's shapes, for administrators."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, StringConstraints
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from services.router.edge.http.bodies import MAX_SETTING_BYTES, STRICT, parse_body, read_body
from services.router.edge.input_processor import InputProcessor
from services.router.edge.tenants.auth import ApiKeys, credentials


class AdapterRequest(BaseModel):
    """The body of `POST /v1/unload_lora_adapter`, and what both bodies have."""

    model_config = STRICT

    lora_name: str
    model: str | None = None


class LoadAdapterRequest(AdapterRequest):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]


A = TypeVar("A", bound=AdapterRequest)


class Adapters:
    """Handlers of both. They ask for an admin key where keys are set; the workers say which folders they read."""

    def __init__(self, input_processor: InputProcessor, keys: ApiKeys) -> None:
        self._input_processor = input_processor
        self._keys = keys

    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """Answers once every connected worker has the adapter; requests that arrive after that use it."""
        asked = await self._body(request, LoadAdapterRequest)
        await self._input_processor.names.load(asked.lora_name, asked.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Answered when the name is unknown; running requests end as they began."""
        asked = await self._body(request, AdapterRequest)
        await self._input_processor.names.unload(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    async def _body(self, request: Request, kind: type[A]) -> A:
        self._keys.check_admin(credentials(request.headers))
        asked = parse_body(kind, await read_body(request.receive, request.headers, MAX_SETTING_BYTES))
        if asked.model and not self._input_processor.names.include(asked.model):
            self._input_processor.check_model(asked.model, "")
        return asked
