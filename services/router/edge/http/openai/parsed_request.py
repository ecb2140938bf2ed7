"""A parsed request as the endpoint uses it, whichever of OpenAI's shapes it came in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.router.dispatch.request import Request
from services.router.edge.http.openai.schemas import ResumedChoice
from services.router.edge.input_processor import Prompt, PromptOptions
from services.router.edge.text.output_processor import OutputDelta
from shared.engine.sampling_params import SamplingParams


class StreamWriter(Protocol):
    """Turns deltas into server-sent events."""

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """The events for choice `index`'s delta; empty where it brings nothing to send."""
        ...

    def closing(self) -> bytes:
        """The events behind the last choice's end, [DONE] included."""
        ...


class BodyWriter(Protocol):
    """Collects deltas into one JSON body."""

    def add(self, index: int, delta: OutputDelta) -> None:
        """Takes choice `index`'s next delta."""
        ...

    def body(self) -> bytes:
        """The response, once every choice has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedRequest(ABC):
    """One request to an endpoint. Each endpoint's own subclass knows how to write its replies."""

    prompts: Sequence[Prompt]
    n: int  # answers a prompt
    sampling: SamplingParams
    default_max_tokens: int | None
    options: PromptOptions
    priority: int | None  # vLLM's: lower goes first; None: the header's
    model: str
    cache_salt: str  # empty: none
    request_id: str  # empty: the header's, or drawn
    stream: bool
    resumed: Sequence[ResumedChoice]  # one a choice; empty: the request begins

    @abstractmethod
    def stream_writer(self, plan: Sequence[Request], request_id: str) -> StreamWriter:
        """Writes the reply as events; `plan` holds the sub-requests in choice order, `request_id` is the base id."""

    @abstractmethod
    def body_writer(self, plan: Sequence[Request], request_id: str) -> BodyWriter:
        """Writes the reply as one body."""
