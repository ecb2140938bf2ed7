"""The ASGI application: its routes, and what wraps them all: request ids, counts by status, the access log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.edge.access import CLIENT_LEFT, NOTE, STATUS, Access
from services.router.edge.catalog import Catalog
from services.router.edge.http.adapter_endpoints import Adapters
from services.router.edge.http.anthropic.endpoint import Messages
from services.router.edge.http.batches.endpoints import Batches
from services.router.edge.http.batches.files import FileStore
from services.router.edge.http.batches.runner import BatchRunner, Idleness
from services.router.edge.http.cache.sessions import SessionCalls
from services.router.edge.http.cache.warm import Warm
from services.router.edge.http.endpoint import Dialect, InferenceEndpoint
from services.router.edge.http.model_switch import ModelSwitch
from services.router.edge.http.openai.chat import Chat
from services.router.edge.http.openai.completions import Completions
from services.router.edge.http.pages.endpoints import Pages, on_error, on_http_exception
from services.router.edge.http.pages.live_pages import LivePages
from services.router.edge.http.pooling.endpoint import Pooling
from services.router.edge.http.responses.background import Background
from services.router.edge.http.responses.conversations import Conversations
from services.router.edge.http.responses.dialect import Responses
from services.router.edge.http.responses.endpoint import ResponsesEndpoint
from services.router.edge.http.responses.mcp.servers import Servers
from services.router.edge.http.responses.shelf import Shelf
from services.router.edge.http.responses.stored import StoredResponses
from services.router.edge.http.tokenization import Tokenization
from services.router.edge.http.weights import Weights
from services.router.edge.input_processor import InputProcessor, checked_request_id
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.views.cluster_view import ClusterView
from shared.errors import InvalidRequest, TandemError
from shared.records.records import Bounds, MemoryRecords, Records

PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/responses/input_tokens",),
    *("/v1/conversations", "/v1/files", "/v1/batches", "/v1/embeddings", "/v1/score", "/v1/rerank"),
    *("/v1/cache/warm", "/v1/cache/close", "/v1/cache/expect"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/update_weights", "/sleep", "/wake_up", "/is_sleeping"),
    *("/tokenize", "/detokenize", "/v1/models", "/version", "/", "/docs", "/openapi.json"),
    *("/healthz", "/health", "/ping", "/readyz", "/metrics", "/status"),
)
"""The paths that requests are counted by."""

_REQUEST_ID = b"x-request-id"


class AccessMiddleware:
    """Wraps the whole application. The status comes from `RequestIds`, which sees every message anyway."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        try:
            await self._app(scope, receive, send)
        except Exception:
            scope[STATUS] = 500
            raise
        finally:
            duration_s = time.perf_counter() - begun
            status = scope.get(STATUS, CLIENT_LEFT)
            self._access.http_ended(scope["method"], scope["path"], status, duration_s, scope.get(NOTE))


class TrailingSlashes:
    """Wraps an application, for which a path with slashes at its end is the one without. A redirect would name this
    hop's scheme and host: plain HTTP where a proxy ends TLS."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


class RequestIds:
    """Wraps an application; answers that have the header already keep theirs. Notes their status in the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope[STATUS] = message["status"]
                headers = message.setdefault("headers", [])
                if not any(name.lower() == _REQUEST_ID for name, _ in headers):
                    message["headers"] = [*headers, (_REQUEST_ID, _request_id(scope).encode())]
            await send(message)

        await self._app(scope, receive, marked)


def _request_id(scope: Scope) -> str:
    try:
        return checked_request_id(Headers(scope=scope).get("x-request-id", ""))
    except InvalidRequest:
        return checked_request_id("")


@dataclass(frozen=True, slots=True)
class Kept:
    """Stores that a router has for its clients, over all models."""

    shelf: Shelf
    background: Background
    files: FileStore | None = None
    runner: BatchRunner | None = None

    @classmethod
    def of(cls, settings: EdgeSettings, catalog: Catalog, records: Records | None = None) -> Kept:
        """Without `records` they are in memory; `catalog` says how idle a model's workers are."""
        kept = settings.kept
        shelf = Shelf(records or MemoryRecords(Bounds(kept.max_bytes, kept.max_bytes)), kept)
        background = Background(shelf, kept.max_background)
        if settings.batch.folder is None:
            return cls(shelf, background)
        files = FileStore(settings.batch)
        idleness = Idleness(lambda model: catalog.find(model).core.idle_room())
        return cls(shelf, background, files, BatchRunner(files, settings.batch, idleness))

    def start(self, app: ASGIApp) -> None:
        """Resumes batches that had not ended; `app` serves their requests. Raises ConfigError."""
        if self.runner is not None:
            self.runner.start(app)

    async def close(self) -> None:
        """Stops what runs for absent clients; batches are resumed at the router's next start."""
        if self.runner is not None:
            await self.runner.close()
        await self.background.close()


def build_app(
    input_processor: InputProcessor,
    settings: EdgeSettings,
    metrics: Callable[[], bytes],
    view: ClusterView,
    catalog: Catalog | None = None,
    kept: Kept | None = None,
) -> Starlette:
    """The ASGI application of one model; `metrics` gives Prometheus text, `view` the cluster's state. `catalog`: all
    models, for the pages that list them, where there are several; `kept` is shared with their applications."""
    keys = ApiKeys.of(settings)
    kept = kept or Kept.of(settings, Catalog([input_processor]))
    tokenizer, model_name, defaults = input_processor.tokenizer, input_processor.model_name, input_processor.defaults
    chat = Chat(tokenizer, model_name, input_processor.formats, defaults)
    messages, completions = Messages(chat), Completions(tokenizer, model_name, defaults)
    dialects: dict[str, Dialect] = {
        "/v1/completions": completions,
        "/v1/chat/completions": chat,
        "/v1/messages": messages,
        "/v1/cache/warm": Warm(chat, completions),
    }
    dialect = Responses(chat, Servers(settings.mcp))
    responses = ResponsesEndpoint(input_processor, dialect, keys, settings, kept.shelf, kept.background)
    stored = StoredResponses(keys, kept.shelf, kept.background)
    conversations = Conversations(keys, kept.shelf, settings)
    batches = Batches(keys, settings, kept.files, kept.runner)
    tokens = Tokenization(input_processor, keys, settings, messages, dialect, kept.shelf)
    pages = Pages(catalog or Catalog([input_processor]), keys, metrics, view)
    live = LivePages(keys, view)
    adapters = Adapters(input_processor, keys)
    weights = Weights(input_processor, keys)
    sessions = SessionCalls(input_processor, keys)
    return Starlette(
        routes=[
            *(
                Route(path, InferenceEndpoint(input_processor, dialect, keys, settings), methods=["POST"], name=path)
                for path, dialect in dialects.items()
            ),
            Route("/v1/responses", responses, methods=["POST"], name="/v1/responses"),
            *stored.routes(),
            *conversations.routes(),
            *batches.routes(),
            *Pooling(input_processor, keys, settings).routes(),
            Route("/v1/cache/close", sessions.close, methods=["POST"]),
            Route("/v1/cache/expect", sessions.expect, methods=["POST"]),
            *tokens.routes(),
            *adapters.routes(),
            *weights.routes(),
            *pages.routes(),
            *live.routes(),
        ],
        middleware=_middleware(settings),
        exception_handlers={
            HTTPException: on_http_exception,
            TandemError: on_error,
            Exception: on_error,
        },
    )


def build_models_app(
    catalog: Catalog,
    settings: EdgeSettings,
    metrics: Callable[[], bytes],
    view: ClusterView,
    access: Access,
    kept: Kept | None = None,
) -> ASGIApp:
    """The ASGI application of one model or of several; `access` counts and logs its requests."""
    kept = kept or Kept.of(settings, catalog)
    apps = {model.model_name: build_app(model, settings, metrics, view, catalog, kept) for model in catalog.models}

    def app_of(name: str) -> ASGIApp:
        return apps[catalog.find(name).model_name]

    app: ASGIApp = apps[catalog.first.model_name]
    if len(apps) > 1:
        app = ModelSwitch(app_of, ApiKeys.of(settings), settings.max_body_bytes)
    return AccessMiddleware(TrailingSlashes(app), access)


def _middleware(settings: EdgeSettings) -> list[Middleware]:
    ids = Middleware(RequestIds)
    if not settings.cors_origins:
        return [ids]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(settings.cors_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
    return [ids, cors]
