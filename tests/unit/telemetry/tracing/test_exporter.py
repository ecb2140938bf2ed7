"""The way out: nothing blocks, everything is bounded and counted."""

from __future__ import annotations

import asyncio
import logging

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shared.telemetry.tracing.exporter import (
    MAX_BATCH_SPANS,
    MAX_QUEUED_SPANS,
    MAX_SPANS_IN_A_ROW,
    SpanExporter,
)
from shared.telemetry.tracing.otlp_connection import CollectorError
from shared.telemetry.tracing.settings import TracesSettings
from shared.telemetry.tracing.span import Span, SpanKind
from shared.telemetry.tracing.tracer import Tracer

DEADLINE_S = 300.0


class Collecting:
    """A collector that fails while a flag says so."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.failing = False
        self.came = asyncio.Event()

    async def export(self, request: bytes) -> None:
        self.came.set()
        if self.failing:
            raise CollectorError("UNAVAILABLE: nobody there")
        self.requests.append(ExportTraceServiceRequest.FromString(request))

    async def close(self) -> None:
        """Nothing to close."""


def span(name: str = "a", span_id: int = 5) -> Span:
    return Span(name, span_id, 4, 1.0, 2.5)


async def until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_span_is_written_as_otlp_has_it():
    collector = Collecting()
    exporter = SpanExporter(collector, {"service.name": "s", "service.instance.id": "i"})
    exporter.start()
    whole = Span(
        "prefill", 5, 4, 1.0, 2.5, SpanKind.SERVER,
        {"text": "x", "whole": 3, "part": 0.5, "is": True, "several": ("a", "b"), "kind": SpanKind.CLIENT},
        (("chunk", 1.5, {"tandem.blocks": 2}),), (7,), "it broke", "vendor=1",
    )  # fmt: skip
    exporter.add(1 << 100, [whole])
    await exporter.close()
    [group] = collector.requests[0].resource_spans
    assert [(pair.key, pair.value.string_value) for pair in group.resource.attributes] == [
        ("service.name", "s"),
        ("service.instance.id", "i"),
    ]
    [found] = group.instrumentation_library_spans[0].spans
    assert (found.trace_id, found.span_id, found.parent_span_id) == (
        (1 << 100).to_bytes(16, "big"),
        (5).to_bytes(8, "big"),
        (4).to_bytes(8, "big"),
    )
    assert (found.name, found.kind, found.trace_state) == ("prefill", found.SPAN_KIND_SERVER, "vendor=1")
    assert found.end_time_unix_nano - found.start_time_unix_nano == 1_500_000_000
    assert (found.status.code, found.status.message) == (found.status.STATUS_CODE_ERROR, "it broke")
    assert {pair.key: pair.value.WhichOneof("value") for pair in found.attributes} == {
        "text": "string_value", "whole": "int_value", "part": "double_value", "is": "bool_value",
        "several": "array_value", "kind": "int_value",
    }  # fmt: skip
    assert [(event.name, event.time_unix_nano - found.start_time_unix_nano) for event in found.events] == [
        ("chunk", 500_000_000)
    ]
    assert [link.span_id for link in found.links] == [(7).to_bytes(8, "big")]


async def test_many_spans_go_in_several_batches_and_all_are_counted():
    collector = Collecting()
    exporter = SpanExporter(collector, {})
    exporter.start()
    for number in range(2 * MAX_BATCH_SPANS):
        exporter.add(number + 1, [span()])
    await until(lambda: exporter.counters.num_exported == 2 * MAX_BATCH_SPANS)
    sizes = [len(request.resource_spans[0].instrumentation_library_spans[0].spans) for request in collector.requests]
    assert sum(sizes) == 2 * MAX_BATCH_SPANS
    assert max(sizes) <= MAX_BATCH_SPANS
    await exporter.close()
    await exporter.close()


async def test_spans_are_built_when_their_turn_comes_and_not_where_they_are_dropped():
    collector, built = Collecting(), []

    def build() -> list[Span]:
        built.append(span())
        return built[-1:]

    exporter = SpanExporter(collector, {})
    exporter.add_later(1, 3, build)
    exporter.add_later(2, MAX_QUEUED_SPANS - 2, build)
    assert not built
    exporter.start()
    await exporter.close()
    assert (len(built), exporter.counters.num_exported, exporter.counters.num_dropped_full) == (
        1,
        1,
        MAX_QUEUED_SPANS - 2,
    )


async def test_a_row_is_built_at_once_and_other_tasks_have_their_turn_between_rows():
    """Long before a second has passed, and without the notes of all traces in memory until then."""
    turns, built_at = 0, []

    def turn() -> None:
        nonlocal turns
        turns += 1
        if len(built_at) < 12:
            asyncio.get_running_loop().call_soon(turn)

    def build() -> list[Span]:
        built_at.append(turns)
        return [span(span_id=number + 1) for number in range(MAX_SPANS_IN_A_ROW // 4)]

    exporter = SpanExporter(Collecting(), {})
    exporter.start()
    turn()
    for number in range(12):
        exporter.add_later(number + 1, MAX_SPANS_IN_A_ROW // 4, build)
    assert not built_at  # never where a request ends
    await until(lambda: len(built_at) == 12)
    assert [built_at.count(number) for number in sorted(set(built_at))] == [4, 4, 4]
    assert exporter.counters.num_exported == 0  # no batch is full
    await exporter.close()
    assert exporter.counters.num_exported == 3 * MAX_SPANS_IN_A_ROW


async def test_a_trace_that_cannot_be_built_costs_itself_alone(caplog):
    def broken() -> list[Span]:
        raise ValueError("a bug")

    exporter = SpanExporter(Collecting(), {})
    exporter.add_later(1, 3, broken)
    exporter.add(2, [span()])
    exporter.start()
    await exporter.close()
    assert (exporter.counters.num_exported, exporter.counters.num_dropped_refused) == (1, 3)
    assert [record.message for record in caplog.records] == ["a trace could not be built"]


async def test_what_is_too_much_is_dropped_and_counted():
    exporter = SpanExporter(Collecting(), {})
    for _ in range(MAX_QUEUED_SPANS // 2 + 1):
        exporter.add(1, [span(), span()])
    assert exporter.counters.num_dropped_full == 2
    await exporter.close()


@pytest.mark.slow
async def test_a_collector_that_does_not_answer_is_logged_once_and_its_spans_are_counted(caplog):
    caplog.set_level(logging.INFO)
    collector = Collecting()
    exporter = SpanExporter(collector, {})
    exporter.start()
    collector.failing = True
    for dropped in (1, 2):
        exporter.add(1, [span()])
        await until(lambda dropped=dropped: exporter.counters.num_dropped_refused == dropped)
    collector.failing = False
    exporter.add(1, [span()])
    await until(lambda: exporter.counters.num_exported == 1)
    await exporter.close()
    mine = [record.levelname for record in caplog.records if record.name.endswith("tracing.exporter")]
    assert mine == ["WARNING", "INFO"]


def test_without_an_endpoint_there_is_no_tracer():
    assert Tracer.of(TracesSettings(), "tandem-test", "t-0") is None
