"""Which calls are traced, and what their clients' headers decide."""

from __future__ import annotations

import pytest

from services.router.dispatch.record import FINISHED, Ask, RequestEvent, RequestRecord, RequestState
from services.router.placement.decision import Choice
from services.router.views.traces.call_trace import NO_TRACE, CallTraces
from shared.errors import InvalidRequest, Overloaded, WorkerLost
from shared.telemetry.trace_context import TraceContext, current_trace_id
from shared.telemetry.tracing.settings import RouterTracesSettings

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{PARENT}-01", f"00-{TRACE_ID}-{PARENT}-00"


class Sink:
    def __init__(self) -> None:
        self.exported = []

    def export(self, trace_id, num_spans, build) -> None:
        self.exported.append((trace_id, build()))
        assert len(self.exported[-1][1]) <= num_spans


def traces(sink: Sink, **settings) -> CallTraces:
    return CallTraces(sink, RouterTracesSettings(**settings))


def ends(sink: Sink, calls: CallTraces, header: str = "", error=None) -> bool:
    """Whether a call that came with the header is exported."""
    before = len(sink.exported)
    calls.begin(header, "", 1.0).end(error, "/v1/chat/completions", "m")
    return len(sink.exported) > before


def test_without_a_collector_a_client_s_context_is_passed_on_and_nothing_recorded():
    calls = CallTraces()
    assert calls.begin("", "", 1.0) is NO_TRACE
    assert current_trace_id() == ""
    trace = calls.begin(SAMPLED, "", 1.0)
    assert (trace.context.traceparent, trace.trace_id, current_trace_id()) == (SAMPLED, TRACE_ID, TRACE_ID)
    assert not trace.is_recorded
    trace.end(None, "/v1/completions", "m")


@pytest.mark.parametrize(
    ("header", "settings", "expected"),
    [
        ("", {}, False),
        ("", {"sample": 1.0}, True),
        (SAMPLED, {}, True),
        (UNSAMPLED, {"sample": 1.0}, False),
        (SAMPLED, {"follow_client": False}, False),
        (UNSAMPLED, {"sample": 1.0, "follow_client": False}, True),
        ("nonsense", {}, False),
    ],
)
def test_the_client_s_flag_decides_where_it_is_followed_and_the_share_elsewhere(header, settings, expected):
    sink = Sink()
    assert ends(sink, traces(sink, **settings), header) == expected


def test_about_the_asked_share_is_sampled():
    sink = Sink()
    calls = traces(sink, sample=0.25)
    assert 400 < sum(ends(sink, calls) for _ in range(2000)) < 600


def test_the_client_s_span_is_the_root_s_parent():
    sink = Sink()
    calls = traces(sink)
    trace = calls.begin(SAMPLED, "vendor=7", 1.0)
    assert current_trace_id() == trace.trace_id == TRACE_ID
    trace.end(None, "/v1/completions", "m")
    trace.end(None, "/v1/completions", "m")
    [(trace_id, [root, edge])] = sink.exported
    assert f"{trace_id:032x}" == TRACE_ID
    assert (root.name, f"{root.parent_id:016x}", root.state, root.error) == (
        "text_completion m",
        PARENT,
        "vendor=7",
        "",
    )
    assert (edge.name, edge.parent_id) == ("edge", root.span_id)


@pytest.mark.parametrize(
    ("error", "kept"), [(WorkerLost("gone"), True), (Overloaded("later"), False), (InvalidRequest("what?"), False)]
)
def test_what_the_cluster_did_wrong_is_kept_though_it_was_not_sampled(error, kept):
    sink = Sink()
    words = []
    calls = CallTraces(sink, RouterTracesSettings(), lambda workers, trace_id: words.append((workers, trace_id)))
    assert ends(sink, calls, UNSAMPLED, error) == kept
    assert words == ([(frozenset(), bytes.fromhex(TRACE_ID))] if kept else [])
    assert not ends(sink, traces(sink, keep_failed=False), UNSAMPLED, error)
    if kept:
        root = sink.exported[0][1][0]
        assert (root.attributes["error.type"], root.error) == (error.code, str(error))


def recorded(ttft_s: float, tpot_s: float) -> RequestRecord:
    made = RequestRecord(Ask("r", "t", 1.0, 3, trace=TraceContext(1, 2, sampled=False), is_traced=True))
    made.choices.append(Choice("d0", "p0"))
    made.add(RequestEvent.ACCEPTED, RequestState.QUEUED, at=1.0)
    made.add(RequestEvent.PLACED, RequestState.RESERVED, "d0", at=1.0)
    made.add(RequestEvent.SUBMITTED, RequestState.PREFILLING, "p0", at=1.0)
    made.add(RequestEvent.FIRST_TOKEN, RequestState.SHIPPING, at=1.0 + ttft_s)
    made.add(RequestEvent.MOVE, RequestState.COPYING, "d1", at=1.0 + ttft_s)
    made.add(RequestEvent.FINISH, RequestState.FINISHED, at=1.0 + ttft_s + 10 * tpot_s)
    made.close(FINISHED, None, 11)
    made.delivered_at = made.entries[-1].at
    return made


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({}, False), ({"slow_ttft_s": 1.5}, True), ({"slow_ttft_s": 2.5}, False), ({"slow_tpot_s": 0.25}, True),
     ({"slow_tpot_s": 0.75}, False)],
)  # fmt: skip
def test_a_slow_request_s_trace_is_kept_by_the_same_ttft_and_tpot_as_elsewhere(settings, kept):
    sink, asked = Sink(), []
    keep = lambda workers, _: asked.append(workers)  # noqa: E731
    calls = CallTraces(sink, RouterTracesSettings(**settings), keep)
    calls.begin(UNSAMPLED, "", 1.0).end(None, "/v1/completions", "m", [recorded(2.0, 0.5)])
    assert (bool(sink.exported), asked) == (kept, [{"d0", "p0", "d1"}] if kept else [])
    if kept:
        root = sink.exported[0][1][0]
        assert (root.attributes["gen_ai.usage.input_tokens"], root.attributes["tandem.tenant"]) == (3, "t")
        assert root.events == (("first token", 3.0, {}),)
