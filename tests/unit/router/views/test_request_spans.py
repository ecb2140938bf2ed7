"""A request's record as spans: every state one, retries and lost workers linked, nothing between them."""

from __future__ import annotations

import itertools

from services.router.dispatch.record import Ask, Failure, RequestRecord, RequestState
from services.router.dispatch.record import RequestEvent as E
from services.router.dispatch.transitions import after
from services.router.placement.decision import Choice
from services.router.views.traces.request_spans import request_spans
from shared.errors import TransferFailed, WorkerLost
from shared.telemetry.trace_context import TraceContext
from shared.telemetry.tracing.span import Span

ROOT = TraceContext(1, 2, sampled=True)
MOMENTS = (E.ACCEPTED, E.MATCHING, E.MATCHED, E.WAITED, E.CHOOSING, E.LATE)


def record(*events: tuple) -> RequestRecord:
    """Of (event, time) or (event, time, error) or (event, time, error, worker)."""
    made = RequestRecord(Ask("r", trace=ROOT, is_traced=True))
    state = RequestState.QUEUED
    for event, at, *more in events:
        error, worker = (*more, None, "")[:2]
        if event not in MOMENTS:
            state = after(state, event)
        if event is E.CHOOSING:
            made.choices.append(Choice("d0", "p0"))
        made.add(event, state, worker or "", Failure.of(error) if error is not None else None, at=at or 1e-9)
    return made


def spans(*events: tuple, now: float = 99.0) -> list[Span]:
    return list(request_spans(record(*events), ROOT.span_id, now))


def named(found: list[Span], name: str) -> list[Span]:
    return [span for span in found if span.name == name]


def assert_no_gap(found: list[Span], parent_id: int, began: float, ended: float) -> None:
    inner = sorted((span for span in found if span.parent_id == parent_id), key=lambda span: (span.began, span.ended))
    assert (inner[0].began, inner[-1].ended) == (began, ended)
    assert all(before.ended == after.began for before, after in itertools.pairwise(inner))


def test_a_hand_off_is_a_span_a_state_without_gaps():
    made = record(
        (E.ACCEPTED, 0.5), (E.MATCHING, 0.6), (E.MATCHED, 1.0), (E.WAITED, 2.0), (E.CHOOSING, 3.5),
        (E.PLACED, 4.0, None, "d0"), (E.SUBMITTED, 5.0, None, "p0"), (E.FIRST_TOKEN, 8.0), (E.JOINED, 9.0),
        (E.FINISH, 20.0),
    )  # fmt: skip
    found = list(request_spans(made, ROOT.span_id, 99.0))
    assert [span.name for span in found] == [
        "match", "queue", "placement", "attempt", "reserve", "prefill", "ship", "decode",
    ]  # fmt: skip
    [match], [prefill], [attempt] = named(found, "match"), named(found, "prefill"), named(found, "attempt")
    assert_no_gap(found, attempt.span_id, 4.0, 20.0)
    assert_no_gap(found, ROOT.span_id, 0.5, 20.0)
    assert (match.span_id, match.began, match.ended) == (made.span_id(1), 0.5, 1.0)
    assert (attempt.span_id, prefill.span_id) == (made.span_id(5), made.span_id(6))  # as the workers got them
    assert prefill.attributes["tandem.worker"] == "p0"
    assert (attempt.attributes["tandem.decode_worker"], attempt.attributes["tandem.prefill_worker"]) == ("d0", "p0")
    assert named(found, "placement")[0].attributes == {"tandem.route": "hand_off"}
    assert not any(span.error or span.links for span in found)
    assert len({span.span_id for span in found}) == len(found)


def test_what_workers_get_of_a_trace_is_the_span_that_asks_them():
    made = record((E.ACCEPTED, 0.0), (E.MATCHING, 1.0))
    assert made.traceparent() == ROOT.traceparent_under(made.span_id(1))
    assert made.traceparent(following=True) == ROOT.traceparent_under(made.span_id(2))
    passed_on = RequestRecord(Ask("r", trace=ROOT))
    assert (passed_on.traceparent(), RequestRecord(Ask("r")).traceparent()) == (ROOT.traceparent, "")


def test_a_retry_links_to_the_attempt_that_failed_and_a_pause_lies_between():
    found = spans(
        (E.ACCEPTED, 0.0), (E.MATCHING, 0.0), (E.MATCHED, 1.0), (E.CHOOSING, 2.0), (E.PLACED, 2.0),
        (E.SUBMITTED, 3.0), (E.RETRY, 4.0, TransferFailed("damaged")), (E.MATCHING, 5.0), (E.MATCHED, 6.0),
        (E.CHOOSING, 7.0), (E.PLACED, 7.0), (E.FAIL, 8.0, WorkerLost("gone")),
    )  # fmt: skip
    first, second = named(found, "attempt")
    assert (first.error, first.attributes["error.type"], first.links, first.ended) == (
        "damaged", "transfer_failed", (), 4.0,
    )  # fmt: skip
    assert (second.error, second.attributes["error.type"], second.links) == ("gone", "worker_lost", (first.span_id,))
    [pause] = named(found, "pause")
    assert (pause.began, pause.ended) == (4.0, 5.0)
    assert_no_gap(found, ROOT.span_id, 1e-9, 8.0)
    assert named(found, "prefill")[0].error == "damaged"


PLACED = ((E.ACCEPTED, 0.0), (E.MATCHED, 0.0), (E.CHOOSING, 1.0), (E.PLACED, 1.0))


def test_a_lost_prefill_worker_is_replaced_within_the_attempt():
    found = spans(
        *PLACED, (E.SUBMITTED, 2.0, None, "p0"), (E.SENDER_LOST, 3.0, WorkerLost("p0 was lost"), "p1"),
        (E.SUBMITTED, 4.0, None, "p1"), (E.FIRST_TOKEN, 5.0), (E.FINISH, 5.0),
    )  # fmt: skip
    lost, other = named(found, "prefill")
    assert (lost.error, lost.links) == ("p0 was lost", ())
    assert (other.error, other.links, other.attributes["tandem.worker"]) == ("", (lost.span_id,), "p1")
    [attempt] = named(found, "attempt")
    assert_no_gap(found, attempt.span_id, 1.0, 5.0)


def test_a_worker_lost_behind_the_first_token_is_taken_over_from_too():
    found = spans(
        *PLACED, (E.SUBMITTED, 2.0), (E.FIRST_TOKEN, 3.0), (E.SENDER_LOST, 4.0, WorkerLost("p0 was lost"), "p1"),
        (E.SUBMITTED, 5.0), (E.JOINED, 6.0), (E.FINISH, 7.0),
    )  # fmt: skip
    lost, other = named(found, "ship")
    [attempt] = named(found, "attempt")
    assert (lost.error, other.links) == ("p0 was lost", (lost.span_id,))
    assert [span.name for span in found if span.parent_id == attempt.span_id] == [
        "reserve", "prefill", "ship", "resume", "ship", "decode",
    ]  # fmt: skip


def test_a_request_that_fails_in_the_queue_says_why_and_leaves_an_older_attempt_as_it_ended():
    found = spans(
        *PLACED, (E.RETRY, 2.0, WorkerLost("one")), (E.MATCHED, 3.0), (E.LATE, 9.0),
        (E.FAIL, 9.0, WorkerLost("nobody is left")),
    )  # fmt: skip
    [attempt], (_, queue) = named(found, "attempt"), named(found, "queue")
    assert (attempt.ended, attempt.error) == (2.0, "one")
    assert (queue.began, queue.ended, queue.error) == (3.0, 9.0, "nobody is left")


def test_what_has_not_ended_ends_now():
    found = spans(*PLACED, (E.SUBMITTED, 2.0), now=5.0)
    assert [named(found, name)[0].ended for name in ("prefill", "attempt")] == [5.0, 5.0]
    [match] = spans((E.ACCEPTED, 0.0), (E.MATCHING, 0.0), now=5.0)
    assert (match.name, match.ended) == ("match", 5.0)


def test_a_request_that_is_cancelled_at_once_or_while_the_index_is_asked_ends_with_that():
    found = spans((E.ACCEPTED, 0.5), (E.CANCEL, 4.0))
    assert [(span.name, span.began, span.ended) for span in found] == [("queue", 0.5, 4.0)]
    found = spans((E.ACCEPTED, 0.5), (E.MATCHING, 1.0), (E.CANCEL, 4.0))
    assert [(span.name, span.began, span.ended) for span in found] == [("match", 0.5, 4.0)]
