"""Spans of traces that were not sampled: bounded, and exported once when the word comes."""

from __future__ import annotations

from shared.telemetry.trace_context import TraceContext
from shared.telemetry.tracing.span import Span
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
