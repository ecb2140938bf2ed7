"""Moves of running answers, as the record tells them: metrics, explanation, spans, attribution."""

from __future__ import annotations

import re

import pytest

from services.router.dispatch.record import Ask, Failure, MoveNote, RequestRecord, RequestState
from services.router.dispatch.record import RequestEvent as E
from services.router.dispatch.transitions import after
from services.router.placement.decision import Choice
from services.router.placement.moves import MoveCause
from services.router.views.attribution.verdict import after_first_token
from services.router.views.explanation import explanation
from services.router.views.metrics import RouterMetrics
from services.router.views.moves import MoveAccount, MoveOutcome, move_accounts
from services.router.views.timings import ttft_split
from services.router.views.traces.request_spans import request_spans
from shared.errors import Overloaded, WorkerLost
from shared.telemetry.trace_context import TraceContext
from tandem_cli.explain import move_line

NOTE = MoveNote(MoveCause.DRAIN, "d0", "d1")
BACK = MoveNote(MoveCause.RESCUE, "d1", "d0")
SWITCHED = ((E.MOVE, 3.0), (E.SWITCHED, 3.5), (E.CAUGHT_UP, 3.75))
CLOSED_UP = ((E.MOVE, 3.0), (E.ASKED_ANEW, 3.25), (E.SWITCHED, 3.5), (E.CAUGHT_UP, 3.75))
STAYED = ((E.MOVE, 3.0), (E.STAYED, 3.5, Overloaded("full")))
ENDED = ((E.MOVE, 3.0), (E.STAYED, 3.5), (E.FINISH, 3.5))
CARRIED = ((E.MOVE, 3.0), (E.LEFT_ALONE, 3.5, WorkerLost("gone")), (E.ASKED_ANEW, 3.5), (E.CAUGHT_UP, 4.0))
CANCELLED = ((E.MOVE, 3.0), (E.CANCEL, 3.5))


def record(*behind: tuple, notes: tuple[MoveNote, ...] = (NOTE,), metrics: RouterMetrics | None = None):
    """An answer that decodes on d0 from second 2 on, arrived at second 1, and what follows."""
    made = RequestRecord(Ask("r", arrived_at=1.0, trace=TraceContext(1, 2, sampled=True), is_traced=True))
    made.choices.append(Choice("d0", None))
    state, given = RequestState.QUEUED, iter(notes)
    for event, at, *error in ((E.PLACED, 1.0), (E.SUBMITTED, 1.0), (E.JOINED, 2.0), *behind):
        state = after(state, event)
        if event is E.MOVE:
            made.moves.append(next(given))
        worker = made.moves[-1].target if made.moves else "d0"
        made.add(event, state, worker, Failure.of(error[0]) if error else None, at=at)
        if metrics is not None:
            metrics.noted(made)
    return made


@pytest.mark.parametrize(
    ("behind", "outcome", "error", "worker"),
    [
        (SWITCHED, MoveOutcome.MOVED, "", "d1"),
        (CLOSED_UP, MoveOutcome.MOVED, "", "d1"),
        (STAYED, MoveOutcome.STAYED, "overloaded", "d0"),
        (ENDED, MoveOutcome.ENDED, "", "d0"),
        (CARRIED, MoveOutcome.CARRIED, "worker_lost", "d1"),
        (CANCELLED, MoveOutcome.ENDED, "", "d0"),
        (SWITCHED[:1], None, "", "d0"),
        (CLOSED_UP[:2], None, "", "d0"),
    ],
)
def test_every_move_is_accounted_for_and_counted_once(behind, outcome, error, worker):
    metrics = RouterMetrics("moves")
    made = record(*behind, metrics=metrics)
    ended_at = 3.5 if outcome is not None else 0.0
    assert list(move_accounts(made)) == [MoveAccount(NOTE, 3.0, outcome, ended_at, error)]
    assert made.decode_worker == worker
    lines = re.findall(r"^tandem_moves_total\{(.*)\} 1\.0$", metrics.page().decode(), re.MULTILINE)
    metrics.close()
    wanted = [('cause="drain"', f'outcome="{outcome.value}"')] if outcome is not None else []
    assert [tuple(part for part in line.split(",") if "gen_ai" not in part) for line in lines] == wanted


def test_a_carried_answer_counts_as_a_migration_and_a_moved_one_does_not():
    for behind, number in ((CARRIED, 1.0), (SWITCHED, 0.0)):
        metrics = RouterMetrics("moves")
        record(*behind, metrics=metrics)
        page = metrics.page().decode()
        metrics.close()
        [line] = [each for each in page.splitlines() if 'phase="answer"' in each and "migrations" in each]
        assert float(line.split()[-1]) == number


def test_an_explanation_lists_the_moves_in_order():
    again = tuple((event, at + 1.0) for event, at in SWITCHED)
    told = explanation(record(*SWITCHED, *again, notes=(NOTE, BACK)), "r")
    assert [(move.source, move.target, move.cause, move.outcome, move.at_ms, move.took_ms) for move in told.moves] == [
        ("d0", "d1", "drain", "moved", 2000.0, 500.0),
        ("d1", "d0", "rescue", "moved", 3000.0, 500.0),
    ]
    assert move_line(told.moves[0]) == "move after 2000 ms: d0 -> d1, its worker drains; moved after 500.0 ms"
    [stayed] = explanation(record(*STAYED), "r").moves
    assert move_line(stayed).endswith("stayed (overloaded) after 500.0 ms")
    [running] = explanation(record(*SWITCHED[:1]), "r").moves
    assert move_line(running).endswith("its worker drains; under way")


def test_a_move_is_spans_of_the_attempt_without_gaps():
    made = record(*CLOSED_UP, (E.FINISH, 5.0))
    attempt, *found = request_spans(made, 2, 9.0)
    assert [(span.name, span.began, span.ended) for span in found] == [
        ("reserve", 1.0, 1.0), ("prefill", 1.0, 2.0), ("decode", 2.0, 3.0), ("copy", 3.0, 3.25),
        ("close up", 3.25, 3.5), ("repeat", 3.5, 3.75), ("decode", 3.75, 5.0),
    ]  # fmt: skip
    assert {span.parent_id for span in found} == {attempt.span_id}
    assert (attempt.began, attempt.ended, attempt.error) == (1.0, 5.0, "")
    assert [span.attributes.get("tandem.worker") for span in found if span.name == "copy"] == ["d1"]


def test_decoding_on_an_earlier_worker_is_decoding_too():
    """The last worker reports its own part alone."""
    made = record(*SWITCHED, (E.FINISH, 5.0))
    made.num_output_tokens, made.decode_ms = 20, 1500.0
    parts = after_first_token(made, ttft_split(made))
    assert {cause.value: round(spent, 3) for cause, spent in parts.items()} == {"decode_step": 3.0}
