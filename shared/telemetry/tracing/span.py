"""One span, as the code that times it notes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from shared.telemetry.trace_context import TraceContext

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value]


class SpanKind(IntEnum):
    """A span's relation to its parent and children, by OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(slots=True)
class Span:
    """A finished span. Plain values: it is turned into OTLP only where it is exported."""

    name: str
    span_id: int
    parent_id: int
    """0 = none."""
    began: float
    """time.perf_counter() seconds, as `ended` and the events' times."""
    ended: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = field(default_factory=dict)
    events: tuple[tuple[str, float, Attributes], ...] = ()
    """(name, time, attributes)."""
    links: tuple[int, ...] = ()
    """Ids of spans of the same trace that this one comes after without being their child: what it is a retry of."""
    error: str = ""
    """Why it failed, `attributes` having `error.type`; empty = it did not."""
    state: str = ""
    """The client's `tracestate`, on the span that has the client's as parent."""


class SpanSink(Protocol):
    """For one event loop."""

    def record(self, context: TraceContext, spans: Sequence[Span]) -> None:
        """Finished spans of the context's trace. Does not block."""

    def release(self, trace_ids: Iterable[bytes]) -> None:
        """These traces (16 bytes each) were not sampled, and are to be exported all the same."""
