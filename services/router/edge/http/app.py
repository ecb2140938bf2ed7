"""Which path leads where."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from services.router.edge.auth import ApiKeys
from services.router.edge.catalog import Catalog
from services.router.edge.http.chat import Chat
from services.router.edge.http.completions import Completions
from services.router.edge.http.endpoint import InferenceEndpoint
from services.router.edge.http.model_switch import ModelSwitch
from services.router.edge.http.pages import Pages, on_error, on_http_exception
from services.router.edge.input_processor import InputProcessor
from services.router.edge.settings import EdgeSettings
from shared.errors import TandemError
from shared.rpc.pb.tandem.v1 import inference_pb2


def build_app(
    input_processor: InputProcessor,
    settings: EdgeSettings,
    metrics: Callable[[], bytes],
    status: Callable[[], inference_pb2.ClusterStatus],
    catalog: Catalog | None = None,
) -> Starlette:
    """The ASGI application of one model; `metrics` gives Prometheus text, `status` the cluster's state. `catalog`: all
    models, for the pages that list them, where there are several."""
    keys = ApiKeys.of(settings)
    completions = Completions(input_processor.tokenizer, input_processor.model_name)
    chat = Chat(input_processor.tokenizer, input_processor.model_name)
    pages = Pages(catalog or Catalog([input_processor]), keys, metrics, status)
    return Starlette(
        routes=[
            Route(
                "/v1/completions",
                InferenceEndpoint(input_processor, completions, keys, settings),
                methods=["POST"],
                name="completions",
            ),
            Route(
                "/v1/chat/completions",
                InferenceEndpoint(input_processor, chat, keys, settings),
                methods=["POST"],
                name="chat_completions",
            ),
            Route("/v1/models", pages.models),
            Route("/v1/models/{model:path}", pages.model),
            Route("/openapi.json", pages.openapi),
            Route("/healthz", pages.healthz),
            Route("/health", pages.healthz),  # vLLM's name
            Route("/readyz", pages.readyz),
            Route("/metrics", pages.metrics),
            Route("/status", pages.status),
        ],
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
    status: Callable[[], inference_pb2.ClusterStatus],
) -> ASGIApp:
    """The ASGI application of one model or of several."""
    apps = {model.model_name: build_app(model, settings, metrics, status, catalog) for model in catalog.models}
    if len(apps) == 1:
        return apps[catalog.first.model_name]

    def app_of(name: str) -> ASGIApp:
        return apps[catalog.find(name).model_name]

    return ModelSwitch(app_of, ApiKeys.of(settings), settings.max_body_bytes)
