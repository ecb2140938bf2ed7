"""The trace of one client's call: its root span, and whether it is exported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from services.router.dispatch.record import RequestRecord
from services.router.views.timings import first_token_at, tpot_s
from services.router.views.traces.request_spans import request_spans
from shared.errors import TandemError
from shared.telemetry.trace_context import TraceContext, new_span_id, new_trace_id, set_current_trace_id
from shared.telemetry.tracing.span import Span, SpanKind, Value

if TYPE_CHECKING:
    from shared.telemetry.tracing.sampler import CallSampler
    from shared.telemetry.tracing.settings import RouterTracesSettings


class TraceSink(Protocol):
    """The receiver of the router's finished traces."""

    def export(self, trace_id: int, num_spans: int, build: Callable[[], list[Span]]) -> None:
        """Takes all the router's spans of a trace, `num_spans` at most: `build` is called once, later. Does not
        block."""


KeepTrace = Callable[[frozenset[str], bytes], None]
"""By (names of workers, trace id of 16 bytes): these workers, and the KV store, are to export their spans of a trace
that was not sampled. Does not block."""


class CallTraces:
    """Begins the trace of each call. Without a sink it passes on a client's trace context, and records nothing."""

    def __init__(
        self,
        sink: TraceSink | None = None,
        settings: RouterTracesSettings | None = None,
        keep: KeepTrace | None = None,
    ) -> None:
        assert sink is None or settings is not None
        self._sink = sink
        self.settings = settings
        self.keep = keep
        self._sampler: CallSampler | None = None
        if settings is not None:
            from shared.telemetry.tracing.sampler import CallSampler  # OpenTelemetry's SDK, where there are traces

            self._sampler = CallSampler(settings)

    def begin(self, traceparent: str, tracestate: str, arrived_at: float) -> CallTrace:
        """A call that came at `arrived_at` (time.perf_counter()) with these headers, both empty where it had none."""
        client = TraceContext.parse(traceparent, tracestate) if traceparent else None
        if self._sink is None:
            set_current_trace_id(client.trace_hex if client is not None else "")
            return CallTrace(client) if client is not None else NO_TRACE
        assert self._sampler is not None
        trace_id = client.trace_id if client is not None else new_trace_id()
        is_sampled = self._sampler.is_sampled(trace_id, client)
        context = TraceContext(trace_id, new_span_id(), is_sampled, client.state if client is not None else "")
        trace = CallTrace(context, self, self._sink, arrived_at, client.span_id if client is not None else 0)
        set_current_trace_id(trace.trace_id)
        return trace


class CallTrace:
    """One call from its arrival to the last byte of its reply. Its spans are made of the records of its requests (one,
    or one a choice) behind its end, and then only for a trace that is exported."""

    __slots__ = ("_began", "_owner", "_parent_id", "_sink", "context", "trace_id")

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

    @property
    def is_recorded(self) -> bool:
        """Spans of it may be exported."""
        return self._owner is not None

    def end(self, error: TandemError | None, route: str, model: str, records: Sequence[RequestRecord] = ()) -> None:
        """The reply is complete, or ended with an error. `route`: the path, or gRPC's method; `model`: its name;
        `records`: of its requests. A no-op the second time."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        assert self._sink is not None
        assert self.context is not None
        now = time.perf_counter()
        begun = tuple(record for record in records if record.entries)
        if not self.context.sampled:
            if not _is_kept(owner, begun, error, now):
                return
            if owner.keep is not None:
                workers = frozenset(name for record in begun for name in _workers(record))
                owner.keep(workers, self.context.trace_id.to_bytes(16, "big"))
        num_spans = 2 + sum(len(record.entries) + len(record.choices) for record in begun)
        self._sink.export(self.context.trace_id, num_spans, partial(self._spans, begun, now, error, route, model))

    def _spans(
        self, records: Sequence[RequestRecord], now: float, error: TandemError | None, route: str, model: str
    ) -> list[Span]:
        """The call's own, then those of its requests."""
        assert self.context is not None
        attributes = _attributes(error, route, model)
        if records:
            attributes |= _request_attributes(records)
        whole = Span(
            f"{_operation(route)} {model}",
            self.context.span_id,
            self._parent_id,
            self._began,
            now,
            SpanKind.SERVER,
            attributes,
            tuple(("first token", at, {}) for record in records if 0 < (at := first_token_at(record)) <= now),
            error=str(error) if error is not None and error.http_status >= 500 else "",
            state=self.context.state,
        )
        submitted = records[0].entries[0].at if records else now
        spans = [whole, Span("edge", new_span_id(), whole.span_id, whole.began, submitted)]
        for record in records:
            spans += request_spans(record, whole.span_id, now)
        return spans


NO_TRACE = CallTrace(None)
"""The trace of a call that has none."""


def _attributes(error: TandemError | None, route: str, model: str) -> dict[str, Value]:
    """Attributes of any call, by the semantic conventions for generative AI, as far as they go."""
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


def _request_attributes(records: Sequence[RequestRecord]) -> dict[str, Value]:
    """What the client asked for and what was spared, for the root span."""
    first, ask = records[0], records[0].ask
    attributes: dict[str, Value] = {
        "gen_ai.request.temperature": ask.temperature,
        "gen_ai.request.top_p": ask.top_p,
        "gen_ai.usage.cache_read.input_tokens": first.num_cached_tokens,
        "gen_ai.usage.input_tokens": ask.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(record.num_output_tokens for record in records),
        "tandem.request_id": ask.request_id,
        "tandem.tenant": ask.tenant,
    }
    if ask.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = ask.max_tokens
    return attributes


def _is_kept(owner: CallTraces, records: Sequence[RequestRecord], error: TandemError | None, now: float) -> bool:
    settings = owner.settings
    assert settings is not None
    if error is not None and error.http_status >= 500 and settings.keep_failed:
        return True
    return any(is_slow(record, settings.slow_ttft_s, settings.slow_tpot_s, now) for record in records)


def is_slow(record: RequestRecord, slow_ttft_s: float, slow_tpot_s: float, now: float) -> bool:
    """Whether TTFT or TPOT took longer than that, 0 = no limit; without a first token, whether it waited for it so
    long."""
    if slow_ttft_s and (first_token_at(record) or now) - record.ask.arrived_at > slow_ttft_s:
        return True
    tpot = tpot_s(record) if slow_tpot_s else None
    return tpot is not None and tpot > slow_tpot_s


def _workers(record: RequestRecord) -> Iterator[str]:
    """Names of all that may have spans of it."""
    return (entry.worker for entry in record.entries if entry.worker)


def _operation(route: str) -> str:
    return "text_completion" if route.endswith("/completions") and not route.endswith("/chat/completions") else "chat"
