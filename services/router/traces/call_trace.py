"""The trace of one client's call: its root span, and whether it is exported."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from services.router.traces.request_trace import RequestTrace, TracedRequest
from shared.errors import TandemError
from shared.telemetry.trace_context import TraceContext, new_span_id, new_trace_id, set_current_trace_id
from shared.telemetry.tracing.span import Span, SpanKind, Value

if TYPE_CHECKING:
    from shared.telemetry.tracing.settings import RouterTracesSettings

_RATIO_BITS = 64
"""Of a trace id that the sampled share is compared with, as OpenTelemetry's TraceIdRatioBased does."""


class TraceSink(Protocol):
    """Where the router's finished traces go."""

    def export(self, trace_id: int, num_spans: int, build: Callable[[], list[Span]]) -> None:
        """Takes all the router's spans of a trace, `num_spans` at most: `build` is called once, later. Does not
        block."""


class CallTraces:
    """Begins the trace of each call. Without a sink it passes on a client's trace context, and records nothing."""

    def __init__(
        self,
        sink: TraceSink | None = None,
        settings: RouterTracesSettings | None = None,
        keep_in_store: Callable[[bytes], None] | None = None,
    ) -> None:
        """`keep_in_store` tells the KV store of a trace that is exported without having been sampled."""
        assert sink is None or settings is not None
        self._sink = sink
        self.settings = settings
        self.keep_in_store = keep_in_store
        self._bound = round((settings.sample if settings is not None else 0.0) * (1 << _RATIO_BITS))

    def begin(self, traceparent: str, tracestate: str, arrived_at: float) -> CallTrace:
        """A call that came at `arrived_at` (time.perf_counter()) with these headers, both empty where it had none."""
        client = TraceContext.parse(traceparent, tracestate) if traceparent else None
        if self._sink is None:
            set_current_trace_id(client.trace_hex if client is not None else "")
            return CallTrace(client) if client is not None else NO_TRACE
        assert self.settings is not None
        if client is None:
            trace_id = new_trace_id()
            context = TraceContext(trace_id, new_span_id(), self._is_drawn(trace_id))
        else:
            sampled = client.sampled if self.settings.follow_client else self._is_drawn(client.trace_id)
            context = TraceContext(client.trace_id, new_span_id(), sampled, client.state)
        trace = CallTrace(context, self, self._sink, arrived_at, client.span_id if client is not None else 0)
        set_current_trace_id(trace.trace_id)
        return trace

    def _is_drawn(self, trace_id: int) -> bool:
        return trace_id & ((1 << _RATIO_BITS) - 1) < self._bound


class CallTrace:
    """One call from its arrival to the last byte of its reply; its requests (one, or one a choice) have a
    `RequestTrace` each. Nothing is built before its end, and then only for a trace that is exported."""

    __slots__ = ("_began", "_owner", "_parent_id", "_requests", "_sink", "_submitted", "context", "trace_id")

    def __init__(
        self,
        context: TraceContext | None,
        owner: CallTraces | None = None,
        sink: TraceSink | None = None,
        began: float = 0.0,
        parent_id: int = 0,
    ) -> None:
        """`context`: of the root span; of the client's own where nothing is recorded."""
        self.context = context
        self.trace_id = context.trace_hex if context is not None else ""
        """As 32 hex digits; empty without a trace."""
        self._owner = owner
        self._sink = sink
        self._began = began
        self._parent_id = parent_id
        self._requests: list[RequestTrace] = []
        self._submitted = 0.0

    @property
    def traceparent(self) -> str:
        """What the workers get of a request that is not recorded; empty without a client's."""
        return self.context.traceparent if self.context is not None else ""

    def request(self, active: TracedRequest) -> RequestTrace | None:
        """The core has accepted one of its requests; None where nothing is recorded."""
        if self._owner is None or self.context is None:
            return None
        trace = RequestTrace(self.context, active)
        self._submitted = self._submitted or trace.began
        self._requests.append(trace)
        return trace

    def end(self, error: TandemError | None, route: str, model: str) -> None:
        """The reply is complete, or ended with an error. `route`: the path, or gRPC's method; `model`: its name.
        A no-op the second time."""
        owner, self._owner = self._owner, None
        if owner is not None:
            self._export(owner, error, route, model)
        for trace in self._requests:
            trace.close()
        self._requests = []

    def _export(self, owner: CallTraces, error: TandemError | None, route: str, model: str) -> None:
        """Hands it to the sink, where it was sampled or is kept. Spans are built there, many at a time: here each would
        meet a processor that has forgotten how."""
        assert self._sink is not None
        assert self.context is not None
        now = time.perf_counter()
        failed = error is not None and error.http_status >= 500
        if not self.context.sampled:
            if not self._is_kept(owner, now, failed=failed):
                return
            self._spread_word(owner)
        traces = tuple(self._requests)
        num_spans = 2 + sum(trace.most_spans for trace in traces)
        num_output_tokens = sum(trace.num_output_tokens for trace in traces)  # the core may still get some
        shown = str(error) if failed else ""
        build = partial(self._spans, traces, now, error, shown, num_output_tokens, route, model)
        self._sink.export(self.context.trace_id, num_spans, build)

    def _spans(
        self,
        traces: Sequence[RequestTrace],
        now: float,
        error: TandemError | None,
        shown: str,
        num_output_tokens: int,
        route: str,
        model: str,
    ) -> list[Span]:
        """The call's own, then those of its requests."""
        assert self.context is not None
        attributes = _attributes(error, route, model)
        if traces:
            attributes |= traces[0].request_attributes()
            attributes["gen_ai.usage.input_tokens"] = traces[0].num_input_tokens
            attributes["gen_ai.usage.output_tokens"] = num_output_tokens
        whole = Span(
            f"{_operation(route)} {model}",
            self.context.span_id,
            self._parent_id,
            self._began,
            now,
            SpanKind.SERVER,
            attributes,
            tuple(("first token", at, {}) for trace in traces if 0 < (at := trace.first_token_at) <= now),
            error=shown,
            state=self.context.state,
        )
        spans = [whole, Span("edge", new_span_id(), whole.span_id, whole.began, self._submitted or now)]
        for trace in traces:
            spans += trace.spans(now)
        return spans

    def _is_kept(self, owner: CallTraces, now: float, *, failed: bool) -> bool:
        settings = owner.settings
        assert settings is not None
        if failed and settings.keep_failed:
            return True
        return any(trace.is_slow(settings.slow_ttft_s, settings.slow_tpot_s, now) for trace in self._requests)

    def _spread_word(self, owner: CallTraces) -> None:
        """Who has spans of it exports them, too."""
        assert self.context is not None
        name = self.context.trace_id.to_bytes(16, "big")
        for worker in {worker for trace in self._requests for worker in trace.workers}:
            worker.keep_trace(name)
        if owner.keep_in_store is not None:
            owner.keep_in_store(name)


NO_TRACE = CallTrace(None)
"""Of a call without a trace."""


def _attributes(error: TandemError | None, route: str, model: str) -> dict[str, Value]:
    """Of any call, by the semantic conventions for generative AI, as far as they go."""
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": _operation(route),
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": model,
        "url.path" if route.startswith("/") else "rpc.method": route,
    }
    if error is not None:
        attributes["error.type"] = error.code
        attributes["http.response.status_code"] = error.http_status
    return attributes


def _operation(route: str) -> str:
    return "text_completion" if route.endswith("/completions") and not route.endswith("/chat/completions") else "chat"
