"""Who can be in time is let in, who cannot is refused as it comes; what waits came to decides the next ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.controller import OPEN, AdmissionController, Estimate
from services.router.admission.queue import AdmissionQueue, QueueEntry
from services.router.placement.prediction import TtftPredictor
from services.router.placement.views import NO_WORK, Work
from shared.errors import Overloaded
from tests.unit.router.placement.builders import pool, view

TOKEN_S = 1e-3


def gate(idle_share: float = 2.0, late_grace: float = 0.0) -> AdmissionController:
    predictor = TtftPredictor()
    for n in range(1, 20):
        predictor.observe_prefill(NO_WORK, Work(n * 50), n * 50 * TOKEN_S)
    return AdmissionController(predictor, idle_share, late_grace)


def queue(*num_tokens: int) -> AdmissionQueue[str]:
    made: AdmissionQueue[str] = AdmissionQueue(1000)
    for number, count in enumerate(num_tokens):
        made.push(QueueEntry(f"w{number}", count), "x")
    return made


def ask(
    at: AdmissionController,
    waiting: AdmissionQueue[str],
    *,
    due_s: float,
    now_s: float = 0.0,
    tokens: int = 100,
    **more,
):
    item = QueueEntry("new", tokens, now_s, now_s + due_s)
    return at.enter(item, now_s, waiting, pool(view("p0"), view("p1")), num_cached=0, **more)


def test_a_wait_that_is_too_long_is_refused_at_arrival_and_a_shorter_one_is_not():
    expected = ask(gate(), queue(800), due_s=0.6)  # 0.4 s behind 800 tokens on two workers, 0.1 s of its own
    assert (expected.own_s, expected.wait_s) == (pytest.approx(0.1, rel=0.05), pytest.approx(0.4, rel=0.05))
    assert expected.latest_start_s == pytest.approx(0.5, rel=0.05)
    with pytest.raises(Overloaded) as refused:
        ask(gate(), queue(2000), due_s=0.6)
    assert refused.value.field == "ttft_deadline"


def test_one_that_goes_first_or_finds_nobody_waiting_is_let_in():
    assert ask(gate(), queue(5000), due_s=0.6, first=True).wait_s == 0.0
    assert ask(gate(), queue(), due_s=0.6).wait_s == 0.0


def test_without_a_deadline_or_before_anything_is_known_nobody_is_refused():
    assert ask(gate(), queue(10**9), due_s=math.inf).latest_start_s == math.inf
    assert ask(AdmissionController(TtftPredictor(), 0.25, 0.0), queue(10**9), due_s=0.01).own_s == 0.0


def test_a_prompt_too_long_for_its_target_may_be_late_where_workers_are_idle_unless_the_client_set_it():
    assert ask(gate(0.25), queue(), due_s=0.05).item.deadline_s == math.inf
    with pytest.raises(Overloaded):
        ask(gate(0.25), queue(), due_s=0.05, strict=True)


def test_waits_longer_than_said_refuse_the_next_ones_sooner():
    at = gate()
    for _ in range(60):
        expected = Estimate(QueueEntry("r", 100, 0.0, 1.0), 0.0, 0.1, 0.5)
        at.gave_up(expected, expected.latest_start_s)  # it was let in with 0.5 s and waited 0.9 s in vain
    assert at.calibration.factor > 1.5
    ask(gate(), queue(900), due_s=0.6)
    with pytest.raises(Overloaded):
        ask(at, queue(900), due_s=0.6)


def test_a_queue_held_up_by_something_else_than_prefill_is_seen_to_be_slow():
    at, now_s = gate(), 0.0
    for number in range(40):
        expected = ask(at, queue(10), due_s=1e6, now_s=now_s)
        now_s += 2.0  # 100 tokens each two seconds, whatever the workers could do
        at.start(expected, now_s, 0.1)
        assert number < 20 or at._drain.wait_s(100, now_s) == pytest.approx(2.0, rel=0.01)
    with pytest.raises(Overloaded):
        ask(at, queue(300), due_s=1.0, now_s=now_s)


def test_a_turn_that_comes_too_late_is_refused():
    at = gate()
    expected = ask(at, queue(800), due_s=0.6)
    with pytest.raises(Overloaded):
        at.start(expected, 0.55, 0.1)
    at.start(ask(at, queue(800), due_s=0.6), 0.3, 0.1)


def test_one_that_was_let_in_may_be_late_by_its_grace_unless_the_client_set_the_target():
    at = gate(late_grace=0.5)
    expected = ask(at, queue(800), due_s=0.6)
    assert expected.given_up_s - expected.latest_start_s == pytest.approx(0.3)
    at.start(expected, 0.75, 0.1)
    with pytest.raises(Overloaded):
        at.start(expected, 0.85, 0.1)
    strict = ask(at, queue(), due_s=0.6, strict=True)
    assert strict.given_up_s == strict.latest_start_s
    with pytest.raises(Overloaded):  # nobody is let in by the grace
        ask(at, queue(2000), due_s=0.6)
    item = QueueEntry("back", 100, 0.0, 0.6)  # but who comes back, refused by a worker, is still let in
    again = at.enter(item, 0.7, queue(800), pool(view("p0"), view("p1")), num_cached=0, first=True)
    assert again.given_up_s > 0.7
    with pytest.raises(Overloaded):
        at.enter(item, 0.7, queue(800), pool(view("p0"), view("p1")), num_cached=0)


@given(
    st.lists(st.integers(1, 5000), max_size=20),
    st.floats(0.001, 30),
    st.integers(1, 5000),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=30),
)
def test_who_is_let_in_is_predicted_to_be_in_time_and_more_ahead_never_helps(ahead, due_s, tokens, seen):
    at = gate()
    for predicted_s, observed_s in seen:
        at.calibration.observe(predicted_s, observed_s)
    try:
        expected = ask(at, queue(*ahead), due_s=due_s, tokens=tokens)
    except Overloaded:
        with pytest.raises(Overloaded):
            ask(at, queue(*(ahead or [0]), 5000), due_s=due_s, tokens=tokens)
        return
    assert expected.own_s + expected.wait_s * at.calibration.factor <= due_s * (1 + 1e-9)
    assert expected.latest_start_s <= due_s


def test_a_token_behind_a_long_cached_prefix_costs_more_than_one_at_the_start():
    """Its attention reads the cached tokens: admission that ignores them lets in what will be late."""
    predictor = TtftPredictor()
    for n in range(1, 40):
        work = Work.of(50 + n % 5, (n % 4) * 2000)
        predictor.observe_prefill(NO_WORK, work, work.tokens * TOKEN_S + work.pairs * 5e-6)
    at = AdmissionController(predictor, 0.25, 0.0)
    item = QueueEntry("new", 50, 0.0, 10.0)
    workers = pool(view("p0"))
    alone = at.enter(item, 0.0, queue(), workers, num_cached=0)
    behind = at.enter(item, 0.0, queue(), workers, num_cached=6000)
    assert behind.own_s - alone.own_s == pytest.approx(50 * 6000 * 5e-6, rel=0.2)


def noted(at: AdmissionController) -> list[tuple[float, float, float]]:
    """From now on what the calibration observes: predicted wait, observed wait, weight."""
    seen: list[tuple[float, float, float]] = []
    at.calibration.observe = lambda predicted_s, observed_s, weight=1.0: seen.append(  # type: ignore[method-assign]
        (predicted_s, observed_s, weight)
    )
    return seen


def waited(*, deadline_s: float = 10.0, wait_s: float = 2.0) -> Estimate:
    """Entered at 1 s, 0.5 s of its own: 8.5 s of slack."""
    return Estimate(QueueEntry("r", 100, 1.0, deadline_s), 1.0, 0.5, wait_s)


def test_a_start_teaches_its_wait_with_what_still_waits_at_the_worker():
    at = gate()
    seen = noted(at)
    at.start(waited(), 4.0, 0.75)
    at.start(waited(), 4.0, 0.25)  # less than its own time: nothing waits there
    at.start(waited(), 4.0, None)
    assert [each[:2] for each in seen] == [(2.0, 3.25), (2.0, 3.0), (2.0, 3.0)]
    assert [each[2] for each in seen] == pytest.approx([(3.25 / 8.5) ** 2, (3 / 8.5) ** 2, (3 / 8.5) ** 2])


def test_one_that_is_started_as_it_comes_teaches_nothing():
    at = gate()
    seen = noted(at)
    at.start(waited(), 1.0, 0.75)
    assert seen == []
    assert at._drain._num_starts == 0


def test_a_wait_weighs_by_the_square_of_what_it_took_or_was_expected_to_take_of_its_slack():
    at = gate()
    seen = noted(at)
    at.gave_up(waited(), 1.25)  # the predicted wait was longer
    at.gave_up(waited(deadline_s=2.0), 9.0)  # no more than all of it
    at.gave_up(waited(deadline_s=1.0), 9.0)  # it never had any
    assert [each[1] for each in seen] == [0.25, 8.0, 8.0]
    assert [each[2] for each in seen] == pytest.approx([(2 / 8.5) ** 2, 1.0, 1.0])
    at.calibration._log = math.log(3.0)
    at.gave_up(waited(), 1.25)
    assert seen[-1][2] == pytest.approx((6 / 8.5) ** 2)


def test_the_factor_moves_as_far_while_waits_are_open_however_many_more_of_them_there_are():
    """What it does to those that come is seen only when they start: with full steps it would swing."""
    moves = []
    for num_open in (OPEN, 4 * OPEN, 64 * OPEN):
        at = gate()
        for _ in range(num_open):
            at.gave_up(waited(deadline_s=2.0, wait_s=0.5)._replace(num_open=num_open), 1.2)  # sooner than predicted
        moves.append(at.calibration._log)
    assert moves == pytest.approx([moves[0]] * 3, rel=0.01)
    assert moves[0] > -0.1
    few = gate()
    few.gave_up(waited()._replace(num_open=OPEN // 2), 9.0)
    alone = gate()
    alone.gave_up(waited(), 9.0)
    assert few.calibration.factor == alone.calibration.factor


def test_without_a_deadline_or_a_predicted_wait_there_is_nothing_to_learn():
    at = gate()
    seen = noted(at)
    at.gave_up(waited(deadline_s=math.inf), 9.0)
    at.gave_up(waited(wait_s=0.0), 9.0)
    assert seen == []


def test_a_prompt_without_workers_to_be_idle_is_not_served_late():
    item = QueueEntry("new", 100, 0.0, 0.05)
    with pytest.raises(Overloaded):
        gate(0.25).enter(item, 0.0, queue(), pool(), num_cached=0)


def test_one_that_a_worker_sent_back_teaches_once_however_often_it_is_tried():
    at = gate()
    item = QueueEntry("r", 100, 0.0, 10.0)
    first = at.enter(item, 0.0, queue(800), pool(view("p0"), view("p1")), num_cached=0)
    at.start(first, 8.0, 0.1)
    factor, rate = at.calibration.factor, at._drain.wait_s(100, 8.0)
    assert factor > 1.0
    for number in range(50):
        now_s = 8.0 + 0.005 * number
        again = at.enter(item, now_s, queue(800), pool(view("p0"), view("p1")), num_cached=0, first=True)
        at.start(again, now_s + 0.004, 1.5)
    assert (at.calibration.factor, at._drain.wait_s(100, 8.0)) == (factor, rate)


def test_a_request_whose_adapter_has_to_be_loaded_everywhere_is_refused_where_that_takes_too_long():
    assert ask(gate(), queue(), due_s=0.6, load_s=0.4).own_s == pytest.approx(0.5, rel=0.05)
    with pytest.raises(Overloaded):
        ask(gate(), queue(), due_s=0.6, load_s=0.55)
    assert ask(AdmissionController(TtftPredictor(), 0.25, 0.0), queue(), due_s=0.1, load_s=1.0).own_s == 0.0
