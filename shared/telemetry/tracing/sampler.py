"""Which calls are traced: the decision of OpenTelemetry's samplers."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from shared.telemetry.trace_context import TraceContext
from shared.telemetry.tracing.settings import RouterTracesSettings

_NO_PARENT = Context()
_FLAGS = {True: TraceFlags(TraceFlags.SAMPLED), False: TraceFlags(TraceFlags.DEFAULT)}
_NAME = "call"
"""The samplers ask for a span's name, and none of ours looks at it."""


class CallSampler:
    """`TraceIdRatioBased` of the share of calls; `ParentBased` on it where a client's flag decides."""

    def __init__(self, settings: RouterTracesSettings) -> None:
        ratio = TraceIdRatioBased(settings.sample)
        self._sampler: Sampler = ParentBased(ratio) if settings.follow_client else ratio

    def is_sampled(self, trace_id: int, client: TraceContext | None) -> bool:
        """Whether a call with this trace id (128 bits) is sampled; `client`: the span that it is a part of, None where
        it has none."""
        parent = _NO_PARENT
        if client is not None:
            span = SpanContext(client.trace_id, client.span_id, is_remote=True, trace_flags=_FLAGS[client.sampled])
            parent = set_span_in_context(NonRecordingSpan(span), _NO_PARENT)
        return self._sampler.should_sample(parent, trace_id, _NAME).decision is Decision.RECORD_AND_SAMPLE
