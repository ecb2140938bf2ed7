"""`POST /v1/cache/warm`: the prompt of a chat or a completion is computed, and what is written behind it is dropped."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic import BaseModel, ConfigDict

from services.router.dispatch.request import Request
from services.router.edge.http.answer_parts import Totals
from services.router.edge.http.bodies import parse_body
from services.router.edge.http.endpoint import ParsedRequest, StreamWriter
from services.router.edge.http.errors import OpenAIErrors
from services.router.edge.http.openai.chat import Chat
from services.router.edge.http.openai.completions import Completions
from services.router.edge.output_stream import OutputDelta
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
"""The least answer: a prompt's blocks lie at the worker that would write the next one."""


class _Shape(BaseModel):
    """Which of the two bodies it is."""

    model_config = ConfigDict(extra="ignore")

    messages: Any = None


class Warm:
    """The endpoint's dialect: both bodies, of which the answer's fields say nothing."""

    errors = OpenAIErrors()

    def __init__(self, chat: Chat, completions: Completions) -> None:
        self._chat = chat
        self._completions = completions

    def parse(self, body: bytes) -> ParsedWarm:
        """Raises InvalidRequest naming the field."""
        is_chat = parse_body(_Shape, body).messages is not None
        asked = self._chat.parse(body) if is_chat else self._completions.parse(body)
        if asked.stream:
            raise InvalidRequest("stream: nothing is streamed where nothing is answered", field="stream")
        if asked.n != 1:
            raise InvalidRequest(f"n must be 1, got {asked.n}: a prompt is computed once", field="n", limit=1)
        if asked.resumed:
            raise InvalidRequest("resume: nothing is answered that could be continued", field="resume")
        given = {field.name: getattr(asked, field.name) for field in fields(ParsedRequest)}
        return ParsedWarm(**{**given, "sampling": ONE_TOKEN, "num_computed": 1}, model_name=self._chat.model_name)


@dataclass(frozen=True, slots=True)
class ParsedWarm(ParsedRequest):
    """See `ParsedRequest`."""

    model_name: str

    def stream_writer(self, plan: Sequence[Request], request_id: str) -> StreamWriter:  # noqa: ARG002 - the base's
        """Is not called: `parse` refuses streams."""
        raise AssertionError("a warmed prompt is not streamed")

    def body_writer(self, plan: Sequence[Request], request_id: str) -> WarmBody:
        """See `ParsedRequest`."""
        return WarmBody(self.model_name, plan, request_id)


class WarmBody:
    """What was computed, and for how long it is retained."""

    def __init__(self, model_name: str, plan: Sequence[Request], request_id: str) -> None:
        self._id = request_id
        self._model_name = plan[0].adapter_name or model_name
        self._retained_s = plan[0].retain_s
        self._totals = Totals(plan, 1)

    def add(self, index: int, delta: OutputDelta) -> None:
        """Takes a delta."""
        if delta.finish is not None:
            self._totals.add(index, delta.finish)

    def body(self) -> bytes:
        """Token counts over all prompts."""
        usage = self._totals.usage()
        num_tokens, details = usage["prompt_tokens"], usage["prompt_tokens_details"]
        assert isinstance(num_tokens, int)
        assert isinstance(details, dict)
        response = {
            "id": f"warm-{self._id}",
            "object": "cache.warm",
            "created": int(time.time()),
            "model": self._model_name,
            "prompt_tokens": num_tokens,
            "cached_tokens": details["cached_tokens"],
            "computed_tokens": num_tokens - details["cached_tokens"],
            "retained_s": self._retained_s,
            **self._totals.extension(),
        }
        return json.dumps(response).encode()
