"""Spans: which are kept, and how they are written."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shared.telemetry.trace_context import TraceContext
from shared.telemetry.tracing.otlp import encoded_request, encoded_spans
from shared.telemetry.tracing.span import Span, SpanKind, Value
from shared.telemetry.tracing.tracer import MAX_WORDS, KeptSpans, Tracer


def spans(*names: str) -> list[Span]:
    return [Span(name, 1, 0, 0.0, 1.0) for name in names]


def test_the_oldest_traces_go_first_beyond_the_bound():
    kept = KeptSpans(max_spans=4)
    for trace_id in (1, 2, 3):
        kept.put(trace_id, spans("a", "b"))
        assert kept.num_spans <= 4
    assert [len(kept.release(trace_id)) for trace_id in (1, 2, 3)] == [0, 2, 2]
    assert kept.num_spans == 0


def test_one_trace_larger_than_the_bound_is_dropped_whole():
    kept = KeptSpans(max_spans=2)
    kept.put(1, spans("a", "b", "c"))
    assert (kept.num_spans, kept.release(1)) == (0, [])


def test_what_comes_behind_the_word_is_not_kept_but_exported():
    kept = KeptSpans()
    assert not kept.put(1, spans("a"))
    assert [span.name for span in kept.release(1)] == ["a"]
    assert kept.put(1, spans("b"))
    assert kept.num_spans == 0
    for trace_id in range(2, MAX_WORDS + 2):
        kept.release(trace_id)
    assert not kept.put(1, spans("c"))  # that word is too old


class Exported:
    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, trace_id, added) -> None:
        self.names += [f"{trace_id}.{span.name}" for span in added]


def test_a_sampled_trace_is_exported_at_once_and_another_one_on_the_word_alone():
    exported = Exported()
    tracer = Tracer(exported)  # type: ignore[arg-type]
    tracer.record(TraceContext(1, 9, sampled=True), spans("a"))
    tracer.record(TraceContext(2, 9, sampled=False), spans("a", "b"))
    tracer.record(TraceContext(3, 9, sampled=False), spans("a"))
    assert exported.names == ["1.a"]
    tracer.release([(2).to_bytes(16, "big"), (77).to_bytes(16, "big")])
    tracer.release([(2).to_bytes(16, "big")])
    assert exported.names == ["1.a", "2.a", "2.b"]
    assert tracer.kept.num_spans == 1


def read(*traces: bytes):
    [group] = ExportTraceServiceRequest.FromString(encoded_request({"service.name": "s"}, traces)).resource_spans
    [scope] = group.instrumentation_library_spans
    assert scope.instrumentation_library.name == "tandem"
    return scope.spans


VALUES = st.one_of(
    st.text().map(lambda text: (text, "string_value")),
    st.booleans().map(lambda value: (value, "bool_value")),
    st.integers(-(2**63), 2**63 - 1).map(lambda number: (number, "int_value")),
    st.floats(allow_nan=False).map(lambda number: (number, "double_value")),
    st.sampled_from(SpanKind).map(lambda kind: (kind, "int_value")),
)


@given(VALUES)
@example(("x" * 20_000, "string_value"))
def test_an_attribute_is_read_back_with_its_kind(pair: tuple[Value, str]) -> None:
    value, kind = pair
    [span] = read(encoded_spans(1, [Span("a", 2, 3, 1.0, 2.0, attributes={"key": value})], 0.0))
    [found] = span.attributes
    assert (found.key, found.value.WhichOneof("value")) == ("key", kind)
    assert getattr(found.value, kind) == value


def test_equal_values_of_several_kinds_stay_apart() -> None:
    attributes = {"key": 1}
    kinds = []
    for value in (1, True, 1.0, 1):
        [span] = read(encoded_spans(1, [Span("a", 2, 3, 1.0, 2.0, attributes={**attributes, "key": value})], 0.0))
        kinds.append(span.attributes[0].value.WhichOneof("value"))
    assert kinds == ["int_value", "bool_value", "double_value", "int_value"]


def test_texts_and_the_empty_list_are_an_array() -> None:
    [span] = read(encoded_spans(1, [Span("a", 2, 3, 1.0, 2.0, attributes={"some": ("b", ""), "none": ()})], 0.0))
    found = {
        pair.key: [item.string_value for item in pair.value.array_value.values]
        for pair in span.attributes
        if pair.value.WhichOneof("value") == "array_value"
    }
    assert found == {"some": ["b", ""], "none": []}


def test_spans_of_several_traces_lie_in_one_request_in_their_order() -> None:
    long = "n" * 300
    first = encoded_spans((1 << 128) - 1, [Span(long, (1 << 64) - 1, 0, 1.0, 2.0), Span("b", 2, 3, 4.0, 3.0)], 0.0)
    spans = read(first, encoded_spans(9, [Span("c", 1, 0, 1.25, 1.5)], 1e9))
    assert [(span.trace_id, span.name) for span in spans] == [
        (b"\xff" * 16, long),
        (b"\xff" * 16, "b"),
        ((9).to_bytes(16, "big"), "c"),
    ]
    assert (spans[0].span_id, spans[0].parent_span_id) == (b"\xff" * 8, b"")
    assert spans[1].end_time_unix_nano == spans[1].start_time_unix_nano == 4_000_000_000  # never before its beginning
    assert (spans[2].start_time_unix_nano, spans[2].end_time_unix_nano) == (
        1_000_000_001_250_000_000,
        1_000_000_001_500_000_000,
    )


def test_half_a_pair_of_surrogates_costs_a_character_and_not_the_request() -> None:
    broken = Span("a\ud800", 2, 3, 1.0, 2.0, attributes={"key\udfff": "v\ud800"}, error="e\ud800", state="s")
    [span] = read(encoded_spans(1, [broken], 0.0))
    assert (span.name, span.status.message, span.trace_state) == ("a?", "e?", "s")
    assert [(pair.key, pair.value.string_value) for pair in span.attributes] == [("key?", "v?")]
