"""One attempt at a request on a worker, in whichever role: its state, what the log calls it, and its span."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from services.worker.adapters.adapter_pool import AdapterLease
from services.worker.blocks.prefix_fetch.fetch import Fetch
from services.worker.session import Session
from shared.engine.messages import FirstScheduled, NewToken
from shared.rpc.convert import finish_reason_to_proto, logprobs_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.telemetry.logs import RequestLog, request_log
from shared.telemetry.trace_context import TraceContext, new_span_id, trace_id_of
from shared.telemetry.tracing.span import Attributes, Span, SpanKind, SpanSink

MAX_SPAN_EVENTS = 128
"""Most events of one span; a longer prompt's later chunks are only counted."""


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
        if len(self.chunks) < MAX_SPAN_EVENTS:
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


def attempt_log(logger: logging.Logger, wire_id: str, traceparent: str) -> RequestLog:
    """`wire_id` is a command's request id: the client's request id, "#", the number of the router's call, ".", and that
    of its attempt, which is what the log shows. `traceparent`: the command's, which may be empty."""
    trace_id = trace_id_of(traceparent)
    request_id, _, numbers = wire_id.rpartition("#")
    attempt = numbers.partition(".")[2]
    return request_log(logger, request_id, trace_id, attempt) if request_id else request_log(logger, wire_id, trace_id)


def is_of(taken: types_pb2.TakeOver, wire_id: str, tenant: str) -> bool:
    """Whether a command belongs to the request that a client continues on another router."""
    return wire_id.rpartition("#")[0] == taken.request_id and tenant == taken.tenant


@dataclass(slots=True)
class WorkerRequest:
    """One attempt at a request in one role. Times are time.perf_counter() seconds, 0 for what has not come."""

    session: Session
    request_id: str
    num_tokens: int
    tenant: str
    log: RequestLog
    trace: AttemptTrace | None
    fetch: Fetch = field(default_factory=Fetch)
    queued_at: float = 0.0
    scheduled_at: float = 0.0
    num_cached_tokens: int = 0
    """Prompt tokens found in the pool when it was scheduled."""
    adapter: AdapterLease | None = None
    """Hold on its adapter; None for the base model."""

    @property
    def has_adapter(self) -> bool:
        """Whether what it computes with is there."""
        return self.adapter is None or self.adapter.slot > 0

    def release_adapter(self) -> None:
        """Nothing of it computes here any more."""
        if self.adapter is not None:
            self.adapter.release()

    def scheduled(self, first: FirstScheduled) -> None:
        """Its first turn in the engine, or a later one that found more of the prompt in the pool."""
        self.scheduled_at = self.scheduled_at or first.at
        self.num_cached_tokens = first.num_cached_tokens

    def write_token(self, message: types_pb2.SequenceTokens, token: NewToken) -> None:
        """Fills a message with a token of this request."""
        message.request_id = self.request_id
        message.token_ids.append(token.token.token_id)
        if token.num_guessed:
            message.num_guessed += token.num_guessed
            message.num_accepted += token.num_accepted
        if token.finish_reason is not None:
            message.finish_reason = finish_reason_to_proto(token.finish_reason)
        logprobs = logprobs_to_proto(token.token)
        if logprobs is not None:
            message.logprobs.append(logprobs)
        for beam in token.beams:
            message.beams.add(
                token_ids=beam.token_ids,
                finish_reason=finish_reason_to_proto(beam.finish_reason),
                score=beam.score,
                logprob=beam.logprob,
            )
        if token.token.pooled:
            message.pooled = token.token.pooled
        if token.prompt_logprobs:
            message.prompt_logprobs.extend(filter(None, map(logprobs_to_proto, token.prompt_logprobs)))

    def write_prompt(self, message: types_pb2.SequenceTokens, computing_s: float) -> None:
        """Adds what the first token's message says of a prompt that was computed here, in `computing_s` seconds."""
        message.num_cached_tokens = self.num_cached_tokens
        message.num_fetched_tokens = min(self.fetch.num_tokens, self.num_cached_tokens)
        message.num_peer_tokens = min(self.fetch.num_peer_tokens, message.num_fetched_tokens)
        message.prefix_fetch_ms = self.fetch.waited_ms
        if self.adapter is not None:
            message.adapter_ms = max(0.0, self.adapter.waited_s * 1e3 - self.fetch.waited_ms)  # both began at once
        message.prefill_queue_ms = (self.scheduled_at - self.queued_at) * 1e3
        message.prefill_compute_ms = computing_s * 1e3
