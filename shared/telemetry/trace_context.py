"""W3C Trace Context: the ids that one process passes to the next, https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import random
import re
from contextvars import ContextVar
from typing import NamedTuple

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_MAX_STATE = 512
"""Characters of a `tracestate` that are passed on; a longer one is left out, as the recommendation allows."""

_current: ContextVar[str] = ContextVar("trace_id", default="")


class TraceContext(NamedTuple):
    """One span as its children see it. A tuple: several are made for a request."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""
    sampled: bool
    """Whether the trace was chosen at its beginning to be exported."""
    state: str = ""
    """The client's `tracestate`."""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """None for an empty or malformed `traceparent`: what cannot be read is as if it were not there."""
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more):
            return None
        context = cls(
            int(trace_id, 16),
            int(span_id, 16),
            bool(int(flags, 16) & _SAMPLED),
            tracestate if len(tracestate) <= _MAX_STATE else "",
        )
        return context if context.trace_id and context.span_id else None

    @property
    def traceparent(self) -> str:
        """The header's value."""
        return self.traceparent_under(self.span_id)

    def traceparent_under(self, span_id: int) -> str:
        """The header's value for children of another span of this trace."""
        return f"00-{self.trace_id:032x}-{span_id:016x}-{self.sampled:02x}"

    @property
    def trace_hex(self) -> str:
        """The trace id as 32 hex digits, as logs show it."""
        return f"{self.trace_id:032x}"

    def under(self, span_id: int) -> TraceContext:
        """The same trace below another of its spans."""
        return TraceContext(self.trace_id, span_id, self.sampled, self.state)


def trace_id_of(traceparent: str) -> str:
    """The trace id in a `traceparent`: 32 hex digits; empty without one, or if it is malformed."""
    context = TraceContext.parse(traceparent) if traceparent else None
    return context.trace_hex if context is not None else ""


def new_trace_id() -> int:
    """128 random bits, not 0."""
    return random.getrandbits(128) or 1


def new_span_id() -> int:
    """64 random bits, not 0."""
    return random.getrandbits(64) or 1


def current_trace_id() -> str:
    """The trace id of the client's request that the running task serves: 32 hex digits; empty without a trace."""
    return _current.get()


def set_current_trace_id(trace_id: str) -> None:
    """Sets what `current_trace_id` returns in this task and in those that it starts from now on."""
    _current.set(trace_id)
