"""The table of a request's states: no state without an exit, no memory without an owner."""

from __future__ import annotations

import pytest

from services.router.dispatch.record import RequestEvent, RequestState
from services.router.dispatch.transitions import HOLDERS, TRANSITIONS, Holder, after
from shared.errors import Internal

ENDS = {RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED}


def test_every_state_is_in_both_tables_and_only_ends_have_no_exit():
    assert set(TRANSITIONS) == set(HOLDERS) == set(RequestState)
    assert {state for state in RequestState if state.ended} == ENDS


@pytest.mark.parametrize("state", [state for state in RequestState if state not in ENDS])
def test_every_living_state_can_fail_be_cancelled_and_finish(state):
    assert TRANSITIONS[state][RequestEvent.FAIL] is RequestState.FAILED
    assert TRANSITIONS[state][RequestEvent.CANCEL] is RequestState.CANCELLED
    reached, new = set(), {state}
    while new:
        reached |= new
        new = {following for name in new for following in TRANSITIONS[name].values()} - reached
    assert RequestState.FINISHED in reached


def test_nobody_holds_memory_for_a_request_that_ended_and_somebody_for_every_other():
    assert {state for state in RequestState if not HOLDERS[state]} == ENDS


def test_the_prefill_worker_is_out_once_the_decode_worker_has_joined():
    holding = {state for state in RequestState if Holder.PREFILL in HOLDERS[state]}
    assert holding == {RequestState.PREFILLING, RequestState.OVERTAKEN, RequestState.SHIPPING}
    assert after(RequestState.SHIPPING, RequestEvent.JOINED) is RequestState.DECODING


def test_a_lost_sender_leaves_the_reservation_to_the_decode_worker_until_another_one_is_told():
    for state in (RequestState.PREFILLING, RequestState.SHIPPING):
        waiting = after(state, RequestEvent.SENDER_LOST)
        assert HOLDERS[waiting] == {Holder.DECODE}
        assert after(waiting, RequestEvent.SUBMITTED) is state
    assert after(RequestState.RESUMING, RequestEvent.JOINED) is RequestState.DECODING


def test_a_held_request_is_submitted_only_after_every_worker_was_heard_from():
    for state in (RequestState.REASSIGNING, RequestState.RESUMING):
        held = after(state, RequestEvent.HELD)
        assert RequestEvent.SUBMITTED not in TRANSITIONS[held]
        assert after(held, RequestEvent.ALL_HEARD) is state
        assert HOLDERS[held] == HOLDERS[state]


def test_while_an_answer_moves_both_workers_hold_it_until_one_alone_does():
    both = {state for state in RequestState if Holder.NEXT in HOLDERS[state]}
    assert both == {RequestState.COPYING, RequestState.CLOSING_UP}
    for state in both:
        assert HOLDERS[state] == {Holder.DECODE, Holder.NEXT}
        assert after(state, RequestEvent.STAYED) is RequestState.DECODING
        for event in (RequestEvent.SWITCHED, RequestEvent.LEFT_ALONE):
            assert HOLDERS[after(state, event)] == {Holder.DECODE}
        assert RequestEvent.FINISH not in TRANSITIONS[state], "the other worker would not be told"
    assert [state for state in RequestState if RequestEvent.MOVE in TRANSITIONS[state]] == [RequestState.DECODING]


def test_a_moving_answer_is_asked_for_anew_at_most_once_while_the_old_worker_has_it():
    assert after(RequestState.COPYING, RequestEvent.ASKED_ANEW) is RequestState.CLOSING_UP
    assert RequestEvent.ASKED_ANEW not in TRANSITIONS[RequestState.CLOSING_UP]
    assert after(RequestState.REPEATING, RequestEvent.ASKED_ANEW) is RequestState.REPEATING


@pytest.mark.parametrize("state", [state for state in RequestState if state in ENDS])
@pytest.mark.parametrize("event", RequestEvent)
def test_nothing_follows_an_end(state, event):
    with pytest.raises(Internal, match=state.value):
        after(state, event)
