"""What an endpoint needs to know of a parsed request, whichever of OpenAI's shapes it came in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.router.edge.generation import OutputDelta
from services.router.edge.input_processor import Prompt
from services.router.request import Request
from shared.engine.sampling_params import SamplingParams


class StreamWriter(Protocol):
    """Turns deltas into server-sent events."""

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """The events that tell of choice `index`'s delta; empty where it says nothing new."""
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
class Call:
    """One request to an endpoint; the writers take the sub-requests, in choice order, and a base id."""

    prompts: Sequence[Prompt]
    n: int  # answers a prompt
    sampling: SamplingParams
    default_max_tokens: int | None
    model: str
    cache_salt: str  # empty: none
    request_id: str  # empty: the header's, or drawn
    stream: bool
    stream_writer: Callable[[Sequence[Request], str], StreamWriter]
    body_writer: Callable[[Sequence[Request], str], BodyWriter]
