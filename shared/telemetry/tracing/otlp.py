"""Spans in OTLP's messages: https://opentelemetry.io/docs/specs/otlp/.

The generated messages are those that `xds-protos` brings; `opentelemetry-proto` has the same files
(docs/decisions/0121). They are those of an older OTLP: what is `scope_spans` and `scope` by now has the same numbers
under other names, so that the bytes are the same. They are imported by who exports, and by nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from shared.telemetry.tracing.span import Attributes, Span, SpanKind, Value

SCOPE = "tandem"
_KINDS = {kind: SpanMessage.SpanKind.ValueType(kind) for kind in SpanKind}
_FIELDS: dict[type, str] = {
    str: "string_value", bool: "bool_value", int: "int_value", float: "double_value",
}  # fmt: skip


def empty_request(resource: Attributes) -> ExportTraceServiceRequest:
    """A request of this resource, without spans."""
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    _set(resource_spans.resource.attributes, resource)
    resource_spans.instrumentation_library_spans.add().instrumentation_library.name = SCOPE
    return request


def add_spans(request: ExportTraceServiceRequest, trace_id: int, spans: Sequence[Span], clock_offset_s: float) -> None:
    """Adds spans of one trace. `clock_offset_s`: what to add to time.perf_counter() for Unix time."""
    into = request.resource_spans[0].instrumentation_library_spans[0].spans
    trace = trace_id.to_bytes(16, "big")
    for span in spans:
        message = into.add(
            trace_id=trace,
            span_id=span.span_id.to_bytes(8, "big"),
            parent_span_id=span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
            name=span.name,
            kind=_KINDS[span.kind],
            start_time_unix_nano=_nanoseconds(span.began, clock_offset_s),
            end_time_unix_nano=_nanoseconds(max(span.began, span.ended), clock_offset_s),
        )
        if span.state:
            message.trace_state = span.state
        if span.error:
            message.status.code = Status.STATUS_CODE_ERROR
            message.status.message = span.error
        if span.attributes:
            _set(message.attributes, span.attributes)
        for name, at, attributes in span.events:
            event = message.events.add(name=name, time_unix_nano=_nanoseconds(at, clock_offset_s))
            _set(event.attributes, attributes)
        for link in span.links:
            message.links.add(trace_id=trace, span_id=link.to_bytes(8, "big"))


def _nanoseconds(at: float, clock_offset_s: float) -> int:
    return round((at + clock_offset_s) * 1e9)


def _set(into: Iterable[KeyValue], attributes: Attributes) -> None:
    add = into.add  # type: ignore[attr-defined]  # a repeated field
    for key, value in attributes.items():
        pair = add(key=key)
        field = _FIELDS.get(type(value))
        if field is not None:
            setattr(pair.value, field, value)
        else:
            _set_other(pair, value)


def _set_other(pair: KeyValue, value: Value) -> None:
    """Texts, or a value of a type derived from a plain one, such as an enum's."""
    if isinstance(value, tuple):
        for item in value:
            pair.value.array_value.values.add(string_value=item)
        return
    field = next(field for kind, field in _FIELDS.items() if isinstance(value, kind))
    setattr(pair.value, field, value)
