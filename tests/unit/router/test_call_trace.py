"""Which calls are traced, and what their clients' headers decide."""

from __future__ import annotations

import pytest

from services.router.traces.call_trace import NO_TRACE, CallTraces
from shared.errors import InvalidRequest, Overloaded, WorkerLost
from shared.telemetry.trace_context import current_trace_id
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
    assert (trace.traceparent, trace.trace_id, current_trace_id()) == (SAMPLED, TRACE_ID, TRACE_ID)
    assert trace.request(None) is None  # type: ignore[arg-type]
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
    calls = CallTraces(sink, RouterTracesSettings(), words.append)
    assert ends(sink, calls, UNSAMPLED, error) == kept
    assert words == ([bytes.fromhex(TRACE_ID)] if kept else [])
    assert not ends(sink, traces(sink, keep_failed=False), UNSAMPLED, error)
    if kept:
        root = sink.exported[0][1][0]
        assert (root.attributes["error.type"], root.error) == (error.code, str(error))
