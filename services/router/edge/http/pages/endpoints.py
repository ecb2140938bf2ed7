"""The endpoints beside inference: models, health, readiness, metrics, status, and what is not there."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.router.edge.catalog import Catalog
from services.router.edge.http.anthropic.errors import AnthropicErrors
from services.router.edge.http.errors import as_tandem_error, error_headers, error_json
from services.router.edge.http.listing import tenant_of
from services.router.edge.http.pages.docs_page import docs_page
from services.router.edge.http.pages.openapi import openapi_document
from services.router.edge.input_processor import InputProcessor
from services.router.edge.tenants.auth import ApiKeys, credentials
from services.router.placement.views import NamedAdapter
from services.router.views.cluster_view import ClusterView
from shared.errors import InvalidRequest, NotFound, TandemError

_UNSERVED: Mapping[tuple[str, str], str] = {
    ("GET", "/v1/chat/completions"): "chat completions are not stored",
    ("POST", "/v1/chat/completions/"): "chat completions are not stored",
    ("DELETE", "/v1/chat/completions/"): "chat completions are not stored",
    ("POST", "/v1/responses/compact"): "responses are not compacted",
    ("DELETE", "/v1/models/"): "models are not deleted by clients",
    ("", "/v1/audio"): "audio is not served",
    ("", "/v1/realtime"): "the realtime API is not served",
    ("", "/v1/images"): "images are not served",
    ("", "/v1/videos"): "videos are not served",
    ("", "/v1/moderations"): "moderation is not served",
    ("", "/v1/vector_stores"): "vector stores are not served",
    ("", "/v1/fine_tuning"): "fine-tuning is not served",
    ("", "/v1/uploads"): "uploads in parts are not served, files are taken whole at /v1/files",
    ("", "/v1/assistants"): "assistants are not served",
    ("", "/v1/threads"): "threads of assistants are not served",
    ("", "/v1/evals"): "evals are not served",
    ("", "/v1/containers"): "containers are not served",
    ("", "/v1/engines"): "engines are not served, models are listed at /v1/models",
}
"""OpenAI's operations that are not here: (method, empty: any; the path's beginning) → why. They are 404, as where a
resource is not there: clients retry what is 501."""

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Pages:
    """Handlers of the plain GET endpoints. `/v1/*` and `/metrics` ask for an API key, the probes do not."""

    def __init__(
        self,
        catalog: Catalog,
        keys: ApiKeys,
        metrics: Callable[[], bytes],
        view: ClusterView,
    ) -> None:
        self._catalog = catalog
        self._keys = keys
        self._metrics = metrics
        self._view = view
        self._created = int(time.time())
        self._version = importlib.metadata.version("tandem-llm")
        self._openapi: bytes | None = None  # until it is asked for

    def routes(self) -> list[Route]:
        """The routes of these pages."""
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/version", self.version),
            Route("/docs", self.docs),
            Route("/openapi.json", self.openapi),
            Route("/healthz", self.healthz),
            Route("/health", self.healthz),  # vLLM's name
            Route("/ping", self.healthz, methods=["GET", "POST"]),  # SageMaker's
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
        ]

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        tenant = tenant_of(request, self._keys)
        data = [self._model(name, model) for name, model in self._catalog.entries()]
        data += [self._adapter(adapter, model) for adapter, model in self._catalog.adapters(tenant)]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`."""
        tenant = tenant_of(request, self._keys)
        name = request.path_params["model"]
        model = self._catalog.find(name)
        model.check_model(name, tenant)
        adapter = model.names.adapter(name, tenant)
        return JSONResponse(self._model(name, model) if adapter is None else self._adapter(adapter, model))

    async def version(self, _: Request) -> Response:
        """`GET /version`."""
        return JSONResponse({"version": self._version})

    async def docs(self, _: Request) -> Response:
        """`GET /docs`."""
        return Response(docs_page(await self._document()), media_type="text/html")

    async def openapi(self, _: Request) -> Response:
        """`GET /openapi.json`."""
        return Response(await self._document(), media_type="application/json")

    async def _document(self) -> bytes:
        """The OpenAPI document. It takes a tenth of a second to make, in a thread so that running answers do not wait,
        and most routers are never asked for it."""
        if self._openapi is None:
            self._openapi = await asyncio.to_thread(openapi_document, self._catalog.first.model_name, self._version)
        return self._openapi

    async def healthz(self, _: Request) -> Response:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    async def readyz(self, _: Request) -> Response:
        """200 when a prompt can be served now, else 503 with the reason; what does not work as it should; and the load,
        for endpoint pickers. Of several models, 200 when any can be served, and each one's reason in `models`."""
        reason = self._catalog.not_ready_reason()
        status = self._view.status()
        load = {"waiting": status.queue_len, "running": status.num_running, "queue_limit": status.queue_limit}
        page: dict[str, object] = {"ready": not reason, "reason": reason, "degraded": list(status.degraded)}
        if len(self._catalog.models) > 1:
            page["models"] = self._catalog.not_ready_reasons()
        return JSONResponse({**page, "load": load}, status_code=503 if reason else 200)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        self._keys.check(credentials(request.headers))
        return Response(self._metrics(), headers={"content-type": _METRICS_TYPE})

    def _adapter(self, adapter: NamedAdapter, model: InputProcessor) -> dict[str, object]:
        entry = self._model(adapter.name, model)
        return {**entry, "root": adapter.digest, "parent": model.model_name}

    def _model(self, name: str, model: InputProcessor) -> dict[str, object]:
        entry: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "max_model_len": model.core.max_prompt_tokens(),
        }
        return entry if name == model.model_name else {**entry, "root": model.model_name}


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the error shape of the API that the path is of."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    reason = _why_unserved(request.method, request.url.path)
    if error.status_code == 404 or reason:
        known = NotFound(f"there is no {where}{reason and f': {reason}'}")
        return _error_page(request, known, 404, "not_found", {})
    refused = InvalidRequest(f"{where}: {error.detail}")
    return _error_page(request, refused, error.status_code, "method_not_allowed", error.headers or {})


def _why_unserved(method: str, path: str) -> str:
    """Why one of OpenAI's operations is not here; empty for other paths."""
    return next(
        (why for (of, begin), why in _UNSERVED.items() if of in ("", method) and path.startswith(begin)),
        "",
    )


async def on_error(request: Request, error: Exception) -> Response:
    """Whatever a page raised."""
    known = as_tandem_error(error, request.headers.get("x-request-id", request.url.path))
    headers = {name.decode(): value.decode() for name, value in error_headers(known)}
    return _error_page(request, known, known.http_status, known.code, headers)


def _error_page(request: Request, error: TandemError, status: int, code: str, headers: Mapping[str, str]) -> Response:
    of_anthropic = request.url.path.startswith("/v1/messages")
    body = AnthropicErrors({}).body(error) if of_anthropic else error_json(error, code)
    return Response(body, status_code=status, headers=headers, media_type="application/json")
