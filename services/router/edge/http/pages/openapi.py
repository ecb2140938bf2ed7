"""The HTTP API as an OpenAPI document, made from the schemas that parse its requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.router.edge.http.anthropic.schemas import CountRequest, MessagesRequest
from services.router.edge.http.batches.endpoints import PURPOSES, BatchRequest
from services.router.edge.http.cache.sessions import CloseRequest, ExpectRequest
from services.router.edge.http.openai.completions import CompletionRequest
from services.router.edge.http.openai.schemas import ChatRequest
from services.router.edge.http.pooling.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from services.router.edge.http.responses.conversations import ConversationRequest, ConversationUpdate, ItemsRequest
from services.router.edge.http.responses.schemas import ResponseRequest
from services.router.edge.http.tokenization import DetokenizeRequest, TokenizeRequest

_REFERENCE = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field or header at fault"},
                "code": {"type": "string"},
            },
        }
    },
}
_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_POSTS: Mapping[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionRequest, "Completes prompts"),
    "/v1/chat/completions": (ChatRequest, "Answers a conversation"),
    "/v1/responses": (ResponseRequest, "Answers a conversation, as OpenAI's responses"),
    "/v1/responses/input_tokens": (ResponseRequest, "Counts the tokens of a response's input"),
    "/v1/conversations": (ConversationRequest, "Begins a conversation that responses continue"),
    "/v1/conversations/{conversation_id}": (ConversationUpdate, "Gives a conversation other metadata"),
    "/v1/conversations/{conversation_id}/items": (ItemsRequest, "Adds items to a conversation"),
    "/v1/embeddings": (EmbeddingRequest, "Vectors of texts"),
    "/v1/score": (ScoreRequest, "How near pairs of texts are"),
    "/v1/rerank": (RerankRequest, "Documents by their nearness to a query"),
    "/v1/cache/warm": (ChatRequest, "Computes a prompt ahead of its requests; a completion's body does too"),
    "/v1/cache/close": (CloseRequest, "Retains nothing for a session any more"),
    "/v1/cache/expect": (ExpectRequest, "When a session comes back"),
    "/v1/batches": (BatchRequest, "Answers a file of requests with what is idle"),
    "/v1/messages": (MessagesRequest, "Answers a conversation, as Anthropic's messages"),
    "/v1/messages/count_tokens": (CountRequest, "Counts the tokens of a conversation"),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or a conversation"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
}
_LIST = ("limit", "order", "after")
_GETS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "/v1/responses/{response_id}": ("A kept response", ()),
    "/v1/responses/{response_id}/input_items": ("What came in with a response, as pages", _LIST),
    "/v1/files": ("The tenant's files, as pages", (*_LIST, "purpose")),
    "/v1/files/{file_id}": ("A file", ()),
    "/v1/batches": ("The tenant's batches, as pages", ("limit", "after")),
    "/v1/batches/{batch_id}": ("A batch", ()),
    "/v1/conversations/{conversation_id}": ("A conversation", ()),
    "/v1/conversations/{conversation_id}/items": ("Its items, as pages", _LIST),
    "/v1/conversations/{conversation_id}/items/{item_id}": ("One of its items", ()),
}
"""Summary and query parameters."""
_CHANGES: Mapping[str, tuple[str, str]] = {
    "/v1/responses/{response_id}": ("delete", "Forgets a response"),
    "/v1/responses/{response_id}/cancel": ("post", "Ends a response in the background"),
    "/v1/files/{file_id}": ("delete", "Forgets a file"),
    "/v1/batches/{batch_id}/cancel": ("post", "Ends a batch; lines without an answer get an error"),
    "/v1/conversations/{conversation_id}": ("delete", "Forgets a conversation"),
    "/v1/conversations/{conversation_id}/items/{item_id}": ("delete", "Removes an item"),
}
"""Method and summary of what changes something and takes no body."""
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_STATUSES = {
    "400": "the request breaks a limit, which the message names",
    "401": "no API key, or an unknown one",
    "404": "the model is not served here, or there is no such thing of the tenant's",
    "409": "a request of this id runs already, and this one has no `resume`",
    "408": "headers or body did not arrive in time",
    "413": "the body is too long",
    "415": "the body is packed: no `Content-Encoding` is read",
    "429": "refused rather than served late, or the key's rate is used up; `Retry-After` says when to come back",
    "431": "the headers are too large",
    "503": "no worker can serve it",
    "504": "the request's deadline passed",
}


def openapi_document(model_name: str, version: str) -> bytes:
    """JSON of the document (OpenAPI 3.1); `version` is Tandem's."""
    schemas: list[type[BaseModel]] = [schema for schema, _ in _POSTS.values()]
    _, definitions = models_json_schema(
        [(schema, "validation") for schema in schemas], ref_template=_REFERENCE + "{model}"
    )
    paths: dict[str, dict[str, object]] = {}
    for path, (schema, summary) in _POSTS.items():
        paths[path] = {"post": _post(path, schema, summary)}
    for path, (summary, query) in _GETS.items():
        paths.setdefault(path, {})["get"] = _operation(path, summary, query)
    for path, (method, summary) in _CHANGES.items():
        paths.setdefault(path, {})[method] = _operation(path, summary)
    paths["/v1/files"]["post"] = _upload()
    document = {
        "openapi": "3.1.0",
        "info": {"title": f"Tandem: {model_name}", "version": version},
        "paths": {
            **paths,
            "/v1/models": _page("The served model"),
            "/v1/models/{model}": {"get": _operation("/v1/models/{model}", "One model")},
            "/version": _page("Tandem's version"),
            "/healthz": _page("The process answers"),
            "/readyz": _page("Whether a prompt can be served now"),
            "/status": _page("The cluster as this router sees it"),
            "/metrics": _page("Prometheus text", media_type="text/plain"),
        },
        "components": {
            "schemas": {**definitions["$defs"], "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }
    return json.dumps(document).encode()


def _post(path: str, schema: type[BaseModel], summary: str) -> Mapping[str, object]:
    is_streamed = path in _STREAMED
    errors = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    body = {"application/json": {"schema": {"$ref": _REFERENCE + schema.__name__}}}
    answer: dict[str, object] = {"application/json": {}, **({"text/event-stream": {}} if is_streamed else {})}
    description = "one body, or events with `stream`" if is_streamed else summary
    return {
        "summary": summary,
        "parameters": _path_parameters(path),
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": description, "content": answer}, **_errors(errors)},
    }


def _upload() -> Mapping[str, object]:
    fields = {"purpose": {"enum": list(PURPOSES)}, "file": {"type": "string", "format": "binary"}}
    schema = {"type": "object", "required": list(fields), "properties": fields}
    return {
        "summary": "Takes a file",
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}},
        "responses": {"200": {"description": "the file", "content": {"application/json": {}}}, **_errors()},
    }


def _operation(path: str, summary: str, query: tuple[str, ...] = ()) -> Mapping[str, object]:
    """One without a body."""
    asked = [{"name": name, "in": "query", "required": False, "schema": {"type": "string"}} for name in query]
    answer = {"description": summary, "content": {"application/json": {}}}
    return {
        "summary": summary,
        "parameters": [*_path_parameters(path), *asked],
        "responses": {"200": answer, **_errors()},
    }


def _path_parameters(path: str) -> list[Mapping[str, object]]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _page(summary: str, media_type: str = "application/json") -> Mapping[str, object]:
    content: dict[str, object] = {media_type: {}}
    return {
        "get": {"summary": summary, "responses": {"200": {"description": summary, "content": content}, **_errors()}}
    }


def _errors(schema: str = "Error") -> Mapping[str, object]:
    content = {"application/json": {"schema": {"$ref": _REFERENCE + schema}}}
    return {status: {"description": why, "content": content} for status, why in _STATUSES.items()}
