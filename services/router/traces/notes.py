"""What is noted of a request while it runs, for its spans. Times are time.perf_counter() seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from services.router.dispatch.states import RequestEvent


class TracedWorker(Protocol):
    """A worker that has spans of a trace."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def keep_trace(self, trace_id: bytes) -> None:
        """Its spans of this trace (16 bytes), which was not sampled, are to be exported. Does not block."""
        ...


Mark = tuple[RequestEvent, float, BaseException | None, int, str]
"""An event of the request, its time and error; for the state that begins with it, its span's id where a worker knows it
already (else 0), and the worker that was asked, where it is known. A plain tuple: a request has six, and costs less."""


@dataclass(slots=True)
class Look:
    """One question to the index."""

    span_id: int
    began: float
    ended: float = 0.0


@dataclass(slots=True)
class AttemptNote:
    """One choice of workers."""

    span_id: int
    placing_at: float
    decode: TracedWorker
    prefill: TracedWorker | None
    route: str
    senders: list[TracedWorker] = field(default_factory=list)
