"""A request's notes as spans: every state one, retries and lost workers linked, nothing between them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from services.router.dispatch.states import RequestEvent as E
from services.router.traces.notes import AttemptNote, Look, Mark
from services.router.traces.request_spans import RequestSpans
from shared.errors import TransferFailed, WorkerLost
from shared.telemetry.trace_context import TraceContext
from shared.telemetry.tracing.span import Span

ROOT = TraceContext(1, 2, sampled=True)


@dataclass(frozen=True)
class Worker:
    name: str

    def keep_trace(self, trace_id: bytes) -> None:
        """Not asked here."""


D0, P0 = Worker("d0"), Worker("p0")


def note(span_id: int, at: float) -> AttemptNote:
    return AttemptNote(span_id, at, D0, P0, "hand_off")


def mark(event: E, at: float, error=None, span_id: int = 0, worker: str = "") -> Mark:
    return (event, at, error, span_id, worker)


def spans(marks, looks, attempts, error=None, now: float = 99.0) -> list[Span]:
    return RequestSpans(ROOT, "r", error).build(0.0, marks, looks, attempts, now)


def named(found: list[Span], name: str) -> list[Span]:
    return [span for span in found if span.name == name]


def assert_no_gap(found: list[Span], parent_id: int, began: float, ended: float) -> None:
    inner = sorted((span for span in found if span.parent_id == parent_id), key=lambda span: (span.began, span.ended))
    assert (inner[0].began, inner[-1].ended) == (began, ended)
    assert all(before.ended == after.began for before, after in itertools.pairwise(inner))


def test_a_hand_off_is_a_span_a_state_without_gaps():
    found = spans(
        [
            mark(E.PLACED, 4.0), mark(E.SUBMITTED, 5.0, span_id=77, worker="p0"), mark(E.FIRST_TOKEN, 8.0),
            mark(E.JOINED, 9.0), mark(E.FINISH, 20.0),
        ],
        [Look(55, 0.1, 1.0)],
        [note(33, 3.5)],
    )  # fmt: skip
    assert [span.name for span in found] == [
        "match", "queue", "placement", "attempt", "reserve", "prefill", "ship", "decode",
    ]  # fmt: skip
    assert_no_gap(found, 33, 4.0, 20.0)
    assert_no_gap(found, ROOT.span_id, 0.0, 20.0)
    [match], [prefill], [attempt] = named(found, "match"), named(found, "prefill"), named(found, "attempt")
    assert (match.span_id, match.began, match.ended) == (55, 0.0, 1.0)
    assert (prefill.span_id, prefill.attributes["tandem.worker"]) == (77, "p0")
    assert (attempt.attributes["tandem.decode_worker"], attempt.attributes["tandem.prefill_worker"]) == ("d0", "p0")
    assert not any(span.error or span.links for span in found)


def test_a_retry_links_to_the_attempt_that_failed_and_a_pause_lies_between():
    found = spans(
        [
            mark(E.PLACED, 2.0), mark(E.SUBMITTED, 3.0), mark(E.RETRY, 4.0, TransferFailed("damaged")),
            mark(E.PLACED, 7.0), mark(E.FAIL, 8.0, WorkerLost("gone")),
        ],
        [Look(55, 0.0, 1.0), Look(56, 5.0, 6.0)],
        [note(33, 2.0), note(34, 7.0)],
    )  # fmt: skip
    first, second = named(found, "attempt")
    assert (first.error, first.attributes["error.type"], first.links, first.ended) == (
        "damaged", "transfer_failed", (), 4.0,
    )  # fmt: skip
    assert (second.error, second.attributes["error.type"], second.links) == ("gone", "worker_lost", (33,))
    [pause] = named(found, "pause")
    assert (pause.began, pause.ended) == (4.0, 5.0)
    assert_no_gap(found, ROOT.span_id, 0.0, 8.0)
    assert named(found, "prefill")[0].error == "damaged"


def test_a_lost_prefill_worker_is_replaced_within_the_attempt():
    found = spans(
        [
            mark(E.PLACED, 1.0), mark(E.SUBMITTED, 2.0, span_id=77, worker="p0"),
            mark(E.SENDER_LOST, 3.0, WorkerLost("p0 was lost")), mark(E.SUBMITTED, 4.0, span_id=78, worker="p1"),
            mark(E.FIRST_TOKEN, 5.0), mark(E.FINISH, 5.0),
        ],
        [],
        [note(33, 1.0)],
    )  # fmt: skip
    lost, other = named(found, "prefill")
    assert (lost.span_id, lost.error, lost.links) == (77, "p0 was lost", ())
    assert (other.span_id, other.error, other.links) == (78, "", (77,))
    assert len(named(found, "attempt")) == 1
    assert_no_gap(found, 33, 1.0, 5.0)


def test_a_worker_lost_behind_the_first_token_is_taken_over_from_too():
    found = spans(
        [
            mark(E.PLACED, 1.0), mark(E.SUBMITTED, 2.0), mark(E.FIRST_TOKEN, 3.0),
            mark(E.SENDER_LOST, 4.0, WorkerLost("p0 was lost")), mark(E.SUBMITTED, 5.0), mark(E.JOINED, 6.0),
            mark(E.FINISH, 7.0),
        ],
        [],
        [note(33, 1.0)],
    )  # fmt: skip
    lost, other = named(found, "ship")
    assert (lost.error, other.links) == ("p0 was lost", (lost.span_id,))
    assert [span.name for span in found if span.parent_id == 33] == [
        "reserve", "prefill", "ship", "resume", "ship", "decode",
    ]  # fmt: skip


def test_a_request_that_fails_in_the_queue_says_why_and_leaves_an_older_attempt_as_it_ended():
    found = spans(
        [mark(E.PLACED, 1.0), mark(E.RETRY, 2.0, WorkerLost("one")), mark(E.FAIL, 9.0)],
        [],
        [note(33, 1.0)],
        error=WorkerLost("nobody is left"),
    )
    [attempt], (_, queue) = named(found, "attempt"), named(found, "queue")
    assert (attempt.ended, attempt.error) == (2.0, "one")
    assert (queue.began, queue.ended, queue.error) == (2.0, 9.0, "nobody is left")


def test_what_has_not_ended_ends_now():
    found = spans([mark(E.PLACED, 1.0), mark(E.SUBMITTED, 2.0)], [], [note(33, 1.0)], now=5.0)
    assert [named(found, name)[0].ended for name in ("prefill", "attempt")] == [5.0, 5.0]
    assert [span.name for span in spans([], [Look(5, 0.0)], [], now=5.0)] == ["match", "queue"]


def test_an_answer_of_the_index_that_came_after_the_end_ends_with_the_request():
    """Spans are built some time after it, and the look may have ended meanwhile."""
    found = spans([mark(E.CANCEL, 4.0)], [Look(55, 0.1, 7.0)], [])
    assert [(span.name, span.began, span.ended) for span in found] == [("match", 0.0, 4.0), ("queue", 4.0, 4.0)]
