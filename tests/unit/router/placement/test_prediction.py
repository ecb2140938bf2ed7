"""Prefill times are learnt from what was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.prediction import MIN_OBSERVATIONS, NEWEST, CostModel, Reliability, TtftPredictor
from services.router.placement.views import NO_WORK, Tier, Work
from tests.unit.router.placement.builders import pool, prompt, view


def test_it_follows_a_machine_that_becomes_slower():
    model = CostModel()
    for n in range(300):
        model.observe(NO_WORK, Work.of(500 + n, 0), (500 + n) * 1e-4)
    for n in range(300):
        model.observe(NO_WORK, Work.of(500 + n, 0), (500 + n) * 3e-4)
    assert model.predict_s(NO_WORK, Work.of(600, 0)) == pytest.approx(0.18, rel=0.1)
    assert model.token_s == pytest.approx(3e-4, rel=0.1)


observations = st.lists(
    st.tuples(st.integers(1, 100_000), st.integers(0, 100_000), st.floats(1e-4, 100)), min_size=8, max_size=30
)


@given(observations, st.integers(1, 50_000), st.integers(0, 50_000))
def test_a_prediction_is_never_negative_and_grows_with_the_prompt(seen, n, cached):
    model = CostModel()
    for uncached, before, took in seen:
        model.observe(NO_WORK, Work.of(uncached, before), took)
    short, long, deep, behind = (
        model.predict_s(NO_WORK, Work.of(n, cached)),
        model.predict_s(NO_WORK, Work.of(2 * n, cached)),
        model.predict_s(NO_WORK, Work.of(n, 2 * cached)),
        model.predict_s(Work.of(n, 0), Work.of(n, cached)),
    )
    assert 0 <= short <= min(long, deep, behind) * (1 + 1e-9)


def test_what_is_queued_comes_first():
    predictor = TtftPredictor()
    assert predictor.pool_s(view(), prompt()) is None
    assert predictor.wait_s(Work(100), pool(view())) is None
    for n in range(1, 30):
        predictor.observe_prefill(NO_WORK, Work(n * 100), n * 0.1)
    predictor.observe_hand_off(0.5)
    assert predictor.pool_s(view(num_queued_tokens=1000), prompt(64)) == pytest.approx(1.0 + 0.064 + 0.5, rel=0.01)
    assert predictor.here_s(view(), prompt(64)) == pytest.approx(0.064, rel=0.01)
    assert predictor.idle_s(Work(64), pool()) == pytest.approx(0.564, rel=0.01)
    assert predictor.wait_s(Work(0), pool(view(num_queued_tokens=1000))) == pytest.approx(1.0, rel=0.01)
    two = pool(view("a", num_queued_tokens=1000), view("b"))
    assert predictor.wait_s(Work(0), two) == 0.0
    assert predictor.wait_s(Work(3000), two) == pytest.approx(2.0, rel=0.01)
    assert predictor.wait_s(Work(500), two) == pytest.approx(0.5, rel=0.01)  # the idle one takes it all
    assert predictor.wait_s(Work(500), pool(view(accepting=False))) == 0.0


def test_an_adapter_that_is_loaded_takes_its_time_beside_the_queue():
    predictor = TtftPredictor()
    for n in range(1, 30):
        predictor.observe_prefill(NO_WORK, Work(n * 100), n * 0.1)
    wanted = replace(prompt(100), adapter="A")
    ready, cold = (view(name, adapters={"A": tier}) for name, tier in (("r", Tier.READY), ("c", Tier.FOLDER)))
    assert predictor.pool_s(cold, wanted) == predictor.pool_s(ready, wanted), "no load was seen yet"
    predictor.observe_adapter(0.5, Tier.FOLDER)
    predictor.observe_adapter(0.2, Tier.HOST)
    predictor.observe_adapter(0.1, Tier.READY)  # it left its slot meanwhile
    assert predictor.pool_s(ready, wanted) == pytest.approx(0.1, rel=0.01)
    assert predictor.pool_s(cold, wanted) == pytest.approx(0.6, rel=0.01)
    assert predictor.pool_s(cold, prompt(100)) == pytest.approx(0.1, rel=0.01)
    assert predictor.pool_s(view(adapters={"A": Tier.HOST}), wanted) == pytest.approx(0.3, rel=0.01)
    cold.num_queued_tokens = 1000
    assert predictor.here_s(cold, wanted) == pytest.approx(1.1, rel=0.01), "it is loaded while the queue passes"
    assert [predictor.least_load_s(pool(*views), "A") for views in ([ready, cold], [cold], [])] == [0.0, 0.5, 0.0]


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=20), st.integers(0, 100_000))
def test_what_waits_fills_up_the_shortest_queues_first(queues, ahead):
    predictor = TtftPredictor()
    for n in range(1, 30):
        predictor.observe_prefill(NO_WORK, Work(n * 100), n * 0.1)
    workers = pool(*(view(f"w{n}", num_queued_tokens=queued) for n, queued in enumerate(queues)))
    token_s = predictor.prefill.token_s
    level = predictor.wait_s(Work(ahead), workers) / token_s
    assert sum(max(0.0, level - queued) for queued in queues) == pytest.approx(ahead, abs=1e-3)
    assert level >= min(queues) - 1e-6


def test_one_hand_off_behind_a_whole_prompt_says_little_of_the_next():
    predictor = TtftPredictor()
    predictor.observe_gap(0.8)
    predictor.observe_hand_off(0.9)
    assert (predictor.gap_s, predictor.hand_off_s) == (0.8, 0.9)
    for _ in range(2):
        predictor.observe_gap(0.03)
        predictor.observe_hand_off(0.005)
    assert (predictor.gap_s, predictor.hand_off_s) == (0.03, 0.005)
    for _ in range(NEWEST):
        predictor.observe_gap(0.2)
    assert predictor.gap_s == 0.2, "what is old is forgotten"


def test_predictions_that_were_always_right_are_within_a_tenth_of_the_next_time():
    """A normal distribution of the logarithm whose spread is 0.1 then."""
    seen = Reliability()
    for _ in range(300):
        seen.observe(2.0, 2.0)
    shares = [seen.share_within(limit_s, 2.0) for limit_s in (2.0 / math.e**0.1, 2.0, 2.0 * math.e**0.1)]
    assert shares == pytest.approx([0.159, 0.5, 0.841], abs=0.01)
    assert [seen.share_within(limit_s, 2.0) for limit_s in (0.0, math.inf)] == [0.0, 1.0]
    assert seen.share_within(2.0, math.inf) == 0.0


@pytest.mark.parametrize("times", [1000.0, 1e-3])
def test_one_time_far_off_counts_as_one_of_seven_times_as_long(times: float):
    """So that a pause of the machine does not make all predictions unreliable."""
    seen = Reliability()
    seen.observe(1.0, times)
    middle = math.exp(math.copysign(0.05 * 2.0, math.log(times)))  # a twentieth of the way
    assert seen.share_within(middle, 1.0) == pytest.approx(0.5)


def test_a_request_is_refused_by_predictions_only_once_some_came_true():
    seen = Reliability()
    for number in range(MIN_OBSERVATIONS):
        assert not seen.is_known, number
        seen.observe(1.0, 1.0)
        seen.observe(0.0, 1.0)  # nothing was predicted
    assert seen.is_known


def test_the_wait_for_a_running_step_is_the_median_by_which_the_newest_predictions_were_exceeded():
    seen = Reliability()
    assert seen.begins_in_s(0.05) == 0.0
    for number in range(NEWEST):
        seen.observe(0.1, 0.1 + (0.03 if number % 3 else 5.0))
    assert seen.begins_in_s(0.05) == pytest.approx(0.03)
    assert seen.begins_in_s(0.01) == pytest.approx(0.02), "no longer than two steps"
    for _ in range(NEWEST):
        seen.observe(0.1, 0.05)
    assert seen.begins_in_s(0.05) == 0.0, "sooner than predicted"
