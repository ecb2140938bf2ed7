"""What a worker's records, spans and messages say of one attempt at a request."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from services.worker.adapters.adapter_pool import AdapterLease
from services.worker.attempt import MAX_SPAN_EVENTS, WorkerRequest, attempt_log, begin_trace, is_of
from services.worker.blocks.prefix_fetch.fetch import Fetch
from services.worker.session import Session
from shared.engine.finish_reason import FinishReason
from shared.engine.messages import FirstScheduled, NewToken
from shared.engine.plan import SampledToken
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.telemetry.tracing.span import Span

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


class Sink:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def record(self, context: Any, spans: list[Span]) -> None:
        self.spans += spans

    def release(self, trace_ids: Any) -> None:
        raise AssertionError


def request(adapter: AdapterLease | None = None) -> WorkerRequest:
    log = attempt_log(logging.getLogger("part"), "r#1.1", "")
    return WorkerRequest(Session(1, "r"), "r#1.1", 48, "t", log, None, adapter=adapter)


@pytest.mark.parametrize(
    ("wire_id", "fields"),
    [("r-1#9.3", ("r-1", "3")), ("a#b#2.1.2", ("a#b", "1.2")), ("from elsewhere", ("from elsewhere", ""))],
)
def test_a_wire_id_is_the_request_s_own_and_the_attempt(wire_id: str, fields: tuple[str, str]) -> None:
    extra = attempt_log(logging.getLogger("part"), wire_id, {}).extra
    assert extra is not None
    assert (extra["request_id"], extra["attempt"]) == fields


def test_a_request_that_is_continued_elsewhere_is_known_by_its_id_and_its_tenant() -> None:
    taken = types_pb2.TakeOver(request_id="a#b", tenant="m")
    assert is_of(taken, "a#b#2.1", "m")
    assert not any(is_of(taken, wire_id, "m") for wire_id in ("a#2.1", "a#b", "a#b#c#2.1"))
    assert not any(is_of(taken, "a#b#2.1", tenant) for tenant in ("", "l", "n"))


def test_spans_of_a_prompt_lie_where_its_parts_were_and_the_chunks_beyond_the_listed_ones_are_counted() -> None:
    sink = Sink()
    trace = begin_trace(sink, TRACEPARENT)
    assert trace is not None
    fetch = Fetch()
    fetch.waited_ms, fetch.num_tokens = 500.0, 32
    source = trace.part("source", 0.0, 1.0)
    fetch.sources.append(source)
    for _ in range(MAX_SPAN_EVENTS + 2):
        trace.chunk(3)
    held, asked, queue, compute = trace.prompt_parts(fetch, trace.began + 1.0, trace.began + 2.0, trace.began + 3.0)
    assert [span.name for span in (held, queue, compute)] == ["fetch", "queue", "compute"]
    times = [(span.began - trace.began, span.ended - trace.began) for span in (held, queue, compute)]
    assert times == [pytest.approx(each) for each in ((0.0, 0.5), (1.0, 2.0), (2.0, 3.0))]
    assert held.attributes == {"tandem.tokens": 32}
    assert asked is source
    assert asked.parent_id == held.span_id
    assert [(name, counts) for name, _, counts in compute.events] == [("chunk", {"tandem.blocks": 3})] * MAX_SPAN_EVENTS
    trace.record("prefill", {"a": 1}, [queue], None)
    assert sink.spans[0].attributes == {"a": 1, "tandem.unlisted_chunks": 2}
    assert sink.spans[1:] == [queue]


def test_what_did_not_happen_to_a_prompt_has_no_span() -> None:
    trace = begin_trace(Sink(), TRACEPARENT)
    assert trace is not None
    begun = request()
    assert trace.prompt_parts(begun.fetch, begun.queued_at, begun.scheduled_at, 0.0) == []
    assert begin_trace(Sink(), "") is begin_trace(None, TRACEPARENT) is begin_trace(Sink(), "no trace") is None


def test_a_request_has_its_adapter_once_that_has_a_slot() -> None:
    assert request().has_adapter
    assert not request(AdapterLease("a")).has_adapter
    assert request(AdapterLease("a", slot=1)).has_adapter


def test_the_first_tokens_message_says_where_its_time_went() -> None:
    begun = request(AdapterLease("a", slot=1, waited_s=0.75))
    begun.queued_at = 10.0
    begun.scheduled(FirstScheduled("r#1.1", 32, 12.5))
    begun.scheduled(FirstScheduled("r#1.1", 40, 14.0))
    begun.fetch.num_tokens, begun.fetch.num_peer_tokens, begun.fetch.waited_ms = 48, 44, 500.0
    message = types_pb2.SequenceTokens()
    begun.write_prompt(message, 0.25)
    assert (message.num_cached_tokens, message.num_fetched_tokens, message.num_peer_tokens) == (40, 40, 40)
    assert (message.prefix_fetch_ms, message.adapter_ms) == (500.0, 250.0)
    assert (message.prefill_queue_ms, message.prefill_compute_ms) == (2500.0, 250.0)


def test_a_message_says_that_its_token_is_the_last_one_only_where_it_is() -> None:
    messages = types_pb2.SequenceTokens(), types_pb2.SequenceTokens()
    for message, reason in zip(messages, (None, FinishReason.LENGTH), strict=True):
        request().write_token(message, NewToken("1/r#1.1", SampledToken(7), reason))
    assert [list(message.token_ids) for message in messages] == [[7], [7]]
    assert [message.request_id for message in messages] == ["r#1.1", "r#1.1"]
    assert messages[0].finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED != messages[1].finish_reason
