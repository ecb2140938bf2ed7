"""Handlers: texts to tokens, vectors from the prefill pool, and what is made of them."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from services.router.dispatch.request import Pooled, PoolRequest
from services.router.edge.http.bodies import check_json_size, read_body
from services.router.edge.http.endpoint import Reply, ended_by_disconnect
from services.router.edge.http.errors import OpenAIErrors
from services.router.edge.http.pooling.schemas import MAX_INPUTS, parse_embedding, parse_rerank, parse_score
from services.router.edge.input_processor import InputProcessor, checked_request_id
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import CALLER, ApiKeys, identified
from services.router.edge.tenants.rate_limits import Account, chain_salt
from services.router.edge.text.prompt_tokenizer import TextPrompt, TokensPrompt
from shared.errors import InvalidRequest, WorkerLost, brief
from shared.tasks import end_task

Vectors = NDArray[np.float32]


class Embedded:
    """The vectors of a call's texts, and their tokens."""

    def __init__(self, vectors: Vectors, num_tokens: int) -> None:
        self.vectors = vectors  # [num_inputs, hidden_size]
        self.num_tokens = num_tokens

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's `usage`."""
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


class Pooling:
    """Handlers of one model. A call's texts are read at the same time, each once."""

    def __init__(self, input_processor: InputProcessor, keys: ApiKeys, settings: EdgeSettings) -> None:
        self._input_processor = input_processor
        self._keys = keys
        self._settings = settings

    def routes(self) -> list[Route]:
        """The routes of these endpoints; those without a version are vLLM's."""
        return [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            *(Route(path, self.score, methods=["POST"]) for path in ("/v1/score", "/score")),
            *(Route(path, self.rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
        ]

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`."""
        call = _Call(self, request)
        asked = parse_embedding(await call.body())
        found = await call.embedded(
            asked.model, asked.inputs, "input", asked.truncate_prompt_tokens, asked.add_special_tokens is not False
        )
        vectors = found.vectors
        if asked.dimensions is not None:
            if asked.dimensions > vectors.shape[1]:
                limit = vectors.shape[1]
                raise InvalidRequest(f"dimensions must be at most {limit}", field="dimensions", limit=limit)
            vectors = self._normalized(vectors[:, : asked.dimensions])
        as_text = asked.encoding_format == "base64"
        data = await asyncio.to_thread(_listed, vectors, as_text=as_text)
        about = {"model": self._input_processor.model_name, "usage": found.usage}
        return _response(call, f'{{"object": "list", "data": [{data}], {json.dumps(about)[1:]}')

    async def score(self, request: Request) -> Response:
        """`POST /v1/score`: cosines of pairs."""
        call = _Call(self, request)
        asked = parse_score(await call.body())
        first, second = asked.pairs
        found = await call.embedded(asked.model, [*first, *second], "text_2", asked.truncate_prompt_tokens)
        scores = _cosines(found.vectors[: len(first)], found.vectors[len(first) :])
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        about = {"object": "list", "created": int(time.time()), "model": self._input_processor.model_name}
        return _json(call, {"id": f"score-{call.request_id}", **about, "data": data}, found)

    async def rerank(self, request: Request) -> Response:
        """`POST /v1/rerank`: documents by their cosine with the query, the nearest first."""
        call = _Call(self, request)
        asked = parse_rerank(await call.body())
        found = await call.embedded(asked.model, [asked.query, *asked.texts], "documents", asked.truncate_prompt_tokens)
        scores = _cosines(found.vectors[:1], found.vectors[1:])
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: asked.top_n]
        results = [
            {
                "index": index,
                **({"document": {"text": asked.texts[index]}} if asked.return_documents is not False else {}),
                "relevance_score": scores[index],
            }
            for index in order
        ]
        about = {"id": f"rerank-{call.request_id}", "model": self._input_processor.model_name}
        return _json(call, {**about, "results": results}, found)

    def _normalized(self, vectors: Vectors) -> Vectors:
        if not self._input_processor.pooling.is_normalized:
            return vectors
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        normalized: Vectors = vectors / np.maximum(lengths, np.float32(1e-12))
        return normalized


class _Call:
    """One call: who asks, and its texts' vectors."""

    def __init__(self, pooling: Pooling, request: Request) -> None:
        """Raises Unauthenticated, InvalidRequest for a header, QuotaExceeded."""
        self._pooling = pooling
        self._request = request
        self.request_id = checked_request_id(request.headers.get("x-request-id", ""))
        hints, whose = identified(request.headers, pooling._keys, request.scope.get(CALLER))
        self._tenant = hints.tenant
        self._account: Account = pooling._input_processor.rates.begin(whose, hints.tenant)

    async def body(self) -> bytes:
        """Raises InvalidRequest (`body`)."""
        settings, processor = self._pooling._settings, self._pooling._input_processor
        body = await read_body(self._request.receive, self._request.headers, settings.max_body_bytes)
        await check_json_size(body, settings.limits, processor.core.max_prompt_tokens())
        return body

    async def embedded(
        self,
        model: str | None,
        inputs: Sequence[str] | Sequence[list[int]],
        field: str,
        truncate_to: int | None,
        add_special_tokens: bool = True,
    ) -> Embedded:
        """Raises ModelNotFound, InvalidRequest naming the field (`model`: an adapter's), PromptTooLong, and what the
        cluster says."""
        processor, settings = self._pooling._input_processor, self._pooling._settings
        processor.check_model(model or "", self._tenant)
        if processor.names.adapter(model or "", self._tenant) is not None:
            value = brief(model or "", 100)
            raise InvalidRequest(f"the adapter {value!r} embeds nothing, its base does", field="model", value=value)
        pooling = processor.pooling.check()
        if not 0 < len(inputs) <= MAX_INPUTS:
            raise InvalidRequest(
                f"{field} must have 1 to {MAX_INPUTS} entries, got {len(inputs)}", field=field, limit=MAX_INPUTS
            )
        prompts = []
        for each in inputs:
            prompt = TextPrompt(each, add_special_tokens) if isinstance(each, str) else TokensPrompt(each)
            prompts.append(await processor.pooled_token_ids(prompt, field, truncate_to))
        num_tokens = sum(map(len, prompts))
        self._account.charge(num_tokens)
        salt = chain_salt(settings.tenants, self._tenant, "")
        timeout_s = settings.deadline_s()
        asked = [
            PoolRequest(
                f"{self.request_id}-{i}",
                token_ids,
                pooling,
                self._tenant,
                f"{salt}\0pooled={secrets.token_hex(8)}" if pooling == "mean" else salt,
                timeout_s,
            )
            for i, token_ids in enumerate(prompts)
        ]
        reply = Reply(_unread, self.request_id, OpenAIErrors())
        try:
            async with ended_by_disconnect(self._request.receive, reply):
                found = await _all(processor.core.pool(each) for each in asked)
        except asyncio.CancelledError:  # only a server that stops cancels this task
            raise WorkerLost("the router is shutting down") from None
        vectors = np.stack([np.frombuffer(each.vector, dtype="<f4") for each in found]).astype(np.float32)
        return Embedded(self._pooling._normalized(vectors), num_tokens)


async def _all(calls: Iterable[Coroutine[Any, Any, Pooled]]) -> list[Pooled]:
    """Awaits all calls; returns their results in order. The first error ends the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.done():
                await end_task(task)


async def _unread(_: Message) -> None:
    """ASGI's `send` of a reply that the handler returns."""


def _cosines(first: Vectors, second: Vectors) -> list[float]:
    """The cosine of each of `second` with its own of `first`, or with the only one."""
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    found: list[float] = ((first * second).sum(axis=1) / np.maximum(lengths, np.float32(1e-12))).tolist()
    return found


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _listed(vectors: Vectors, *, as_text: bool) -> str:
    """OpenAI's `embedding` objects, as many as there are vectors. One dump a vector: the thread that writes millions of
    numbers gives way to the event loop between two."""
    return ", ".join(
        json.dumps({"object": "embedding", "index": i, "embedding": _base64(vector) if as_text else vector.tolist()})
        for i, vector in enumerate(vectors)
    )


def _json(call: _Call, body: dict[str, object], found: Embedded) -> Response:
    return _response(call, json.dumps({**body, "usage": found.usage}))


def _response(call: _Call, content: str) -> Response:
    return Response(content, media_type="application/json", headers={"x-request-id": call.request_id})
