"""What the traces of prefill and decode workers have in common: one span an attempt, its parts below it."""

from __future__ import annotations

import time

from services.worker.blocks.prefix_fetch.fetch import Fetch
from shared.telemetry.trace_context import TraceContext, new_span_id
from shared.telemetry.tracing.span import Attributes, Span, SpanKind, SpanSink

MAX_EVENTS = 128
"""Of one span; a longer prompt's later chunks are only counted."""


class AttemptTrace:
    """Notes of one attempt at a request on one worker. Nothing is noted for each token."""

    __slots__ = ("_context", "_num_more", "_sink", "_span_id", "began", "chunks")

    def __init__(self, sink: SpanSink, context: TraceContext) -> None:
        """`context`: of the router's span."""
        self.began = time.perf_counter()
        self.chunks: list[tuple[str, float, Attributes]] = []
        """Events of its chunks: see `chunk`."""
        self._sink = sink
        self._context = context
        self._span_id = new_span_id()
        self._num_more = 0

    @property
    def context(self) -> TraceContext:
        """Trace context of the attempt's span."""
        return self._context.under(self._span_id)

    def chunk(self, num_blocks: int) -> None:
        """A step of the engine has sealed this many of its blocks, which leave now."""
        if len(self.chunks) < MAX_EVENTS:
            self.chunks.append(("chunk", time.perf_counter(), {"tandem.blocks": num_blocks}))
        else:
            self._num_more += 1

    def record(self, name: str, attributes: Attributes, parts: list[Span], error: Exception | None) -> None:
        """Records the attempt's span, from its beginning until now, and the spans of its parts."""
        if self._num_more:
            attributes = {**attributes, "tandem.unlisted_chunks": self._num_more}
        span = Span(
            name, self._span_id, self._context.span_id, self.began, time.perf_counter(), SpanKind.SERVER, attributes
        )
        if error is not None:
            span.error = str(error)
            span.attributes = {**attributes, "error.type": getattr(error, "code", type(error).__name__)}
        self._sink.record(self._context, [span, *parts])

    def part(self, name: str, began: float, ended: float, attributes: Attributes | None = None) -> Span:
        """Adds a child span."""
        return Span(name, new_span_id(), self._span_id, began, ended, attributes=attributes or {})

    def prompt_parts(self, fetch: Fetch, queued_at: float, scheduled_at: float, first_token_at: float) -> list[Span]:
        """The parts of a prompt that is computed here, as far as it came: 0 for what did not happen."""
        now = time.perf_counter()
        parts = []
        if fetch.waited_ms:
            held = self.part(
                "fetch", self.began, self.began + fetch.waited_ms / 1e3, {"tandem.tokens": fetch.num_tokens}
            )
            parts.append(held)
            for source in fetch.sources:
                source.parent_id = held.span_id
                parts.append(source)
        if queued_at:
            parts.append(self.part("queue", queued_at, scheduled_at or now))
        if scheduled_at:
            compute = self.part("compute", scheduled_at, first_token_at or now)
            compute.events = tuple(self.chunks)
            parts.append(compute)
        return parts


def begin_trace(sink: SpanSink | None, traceparent: str) -> AttemptTrace | None:
    """None where this worker records nothing, or the router sent no trace."""
    if sink is None or not traceparent:
        return None
    context = TraceContext.parse(traceparent)
    return AttemptTrace(sink, context) if context is not None else None
