"""The router's spans of requests on scripted workers: states, retries, and who hears that a trace is kept."""

from __future__ import annotations

import asyncio
import itertools

from services.router.views.traces.call_trace import CallTraces
from services.router.workers.liveness import LivenessLimits
from shared.errors import TransferFailed, WorkerLost
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.telemetry.trace_context import TraceContext
from shared.telemetry.tracing.settings import RouterTracesSettings
from tests.integration.router.router_under_test import STOP, Router, decode_worker, prefill_worker, read
from tests.integration.router.test_heartbeats import BeatingWorker
from tests.waiting import DEADLINE_S


class Sink:
    def __init__(self) -> None:
        self.spans = []

    def export(self, trace_id, num_spans, build) -> None:
        self.spans = build()
        assert len(self.spans) <= num_spans

    def named(self, name):
        return [span for span in self.spans if span.name == name]


def call(sink: Sink, keep=None, **settings):
    return CallTraces(sink, RouterTracesSettings(**{"sample": 1.0, **settings}), keep).begin("", "", 1.0)


def parent_of(command) -> TraceContext:
    context = TraceContext.parse(command.traceparent)
    assert context is not None
    return context


async def test_each_state_is_a_span_and_workers_get_the_span_that_asks():
    prefill, decode, sink = prefill_worker(), decode_worker(), Sink()
    async with Router([prefill], [decode]) as router:
        trace = call(sink)
        running = router.ask(trace=trace.context, is_traced=True)
        reserve = await decode.expect(worker_pb2.Reserve)
        await decode.reserved(reserve.request_id)
        submit = await prefill.expect(worker_pb2.Submit)
        await prefill.first_token(submit.request_id, 50)
        await decode.step(submit.request_id, 51, finish=STOP)
        assert await read(running) == [50, 51]
        trace.end(None, "/v1/completions", "m", [running.record])
    root = sink.spans[0]
    outer = [span for span in sink.spans if span.parent_id == root.span_id]
    assert [span.name for span in outer] == ["edge", "queue", "placement", "attempt"]  # this router has no index
    assert all(before.ended == after.began for before, after in itertools.pairwise(outer))
    [attempt] = sink.named("attempt")
    below = [span for span in sink.spans if span.parent_id == attempt.span_id]
    assert [span.name for span in below] == ["reserve", "prefill", "ship", "decode"]
    assert all(before.ended == after.began for before, after in itertools.pairwise(below))
    assert parent_of(reserve).span_id == attempt.span_id
    assert parent_of(submit).span_id == below[1].span_id
    assert parent_of(reserve).sampled
    assert root.attributes["gen_ai.usage.output_tokens"] == 2
    assert {span.error for span in sink.spans} == {""}


async def test_a_retry_links_to_the_attempt_that_failed():
    prefill, decode, sink = prefill_worker(), decode_worker(), Sink()
    async with Router([prefill], [decode]) as router:
        trace = call(sink)
        running = router.ask(trace=trace.context, is_traced=True)
        first = await decode.expect(worker_pb2.Reserve)
        await decode.failed(first.request_id, to_proto(TransferFailed("blocks were damaged")))
        await decode.expect(types_pb2.Cancel)
        second = await decode.expect(worker_pb2.Reserve)
        await decode.failed(second.request_id, to_proto(WorkerLost("too busy")))
        await decode.expect(types_pb2.Cancel)
        third = await decode.expect(worker_pb2.Reserve)
        await decode.reserved(third.request_id)
        submit = await prefill.expect(worker_pb2.Submit)
        await prefill.first_token(submit.request_id, 50, finish=STOP)
        await read(running)
        trace.end(None, "/v1/completions", "m", [running.record])
    one, two, three = sink.named("attempt")
    assert [span.attributes.get("error.type") for span in (one, two, three)] == ["transfer_failed", "worker_lost", None]
    assert (one.links, two.links, three.links) == ((), (one.span_id,), (two.span_id,))
    assert len(sink.named("queue")) == len(sink.named("placement")) == 3
    assert {parent_of(command).span_id for command in (first, second, third)} == {
        one.span_id, two.span_id, three.span_id,
    }  # fmt: skip


class Hearing(BeatingWorker):
    """Keeps what the router's heartbeats say of traces."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[bytes] = []
        self.heard = asyncio.Event()

    async def on_command(self, command) -> None:
        if isinstance(command, types_pb2.Heartbeat):
            self.kept += command.kept_traces
            self.heard.set()
        await super().on_command(command)

    async def next_beat(self) -> None:
        for _ in range(2):  # one may have been on its way
            self.heard.clear()
            async with asyncio.timeout(DEADLINE_S):
                await self.heard.wait()


async def test_a_worker_hears_by_heartbeat_of_a_failed_request_that_was_not_sampled_and_of_no_other():
    decode, sink = Hearing(), Sink()
    async with Router([prefill_worker()], [decode], limits=LivenessLimits(suspect_after_s=0.5)) as router:
        await router.until(lambda: not any(link.suspicion for link in router.fleet.decodes.values()))
        for error in (None, WorkerLost("gone")):
            trace = call(sink, router.fleet.keep_trace, sample=0.0)
            running = router.ask(trace=trace.context, is_traced=True)
            reserve = await decode.expect(worker_pb2.Reserve)
            assert not parent_of(reserve).sampled
            await running.aclose()
            await decode.expect(types_pb2.Cancel)
            trace.end(error, "/v1/completions", "m", [running.record])
            await decode.next_beat()
            expected = [parent_of(reserve).trace_id.to_bytes(16, "big")] if error is not None else []
            assert (decode.kept, bool(sink.spans)) == (expected, error is not None)
        assert sink.spans[0].attributes["error.type"] == "worker_lost"
