"""What a wait comes to, and whether it ends in time."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.blocked import BlockedClock, Cause, between, blocker
from services.router.admission.controller import (
    MAX_FACTOR,
    MIN_STARTS,
    DrainRate,
    WaitCalibration,
    check_deadline,
    may_be_late,
)
from services.router.placement.views import NO_HITS, PlacementRequest, WorkerView
from shared.errors import Overloaded
from shared.kv.groups import KVGroups
from tests.unit.router.placement.builders import pool, view


def worker(**fields) -> WorkerView:
    known = {
        "name": "d0", "num_free_blocks": 100, "num_total_blocks": 100, "num_requests": 0, "max_num_seqs": 8,
        "num_queued_tokens": 0,
    }  # fmt: skip
    return WorkerView(**{**known, **fields})


REQUEST = PlacementRequest(64, KVGroups(16), NO_HITS)


@pytest.mark.parametrize(
    ("workers", "cause"),
    [
        ([], Cause.QUEUEING),
        ([worker(accepting=False)], Cause.QUEUEING),
        ([worker()], Cause.PREFILL_COMPUTE),
        ([worker(num_free_blocks=1)], Cause.KV_ROOM),
        ([worker(num_requests=8)], Cause.DECODE_STEP),
        ([worker(num_requests=8), worker(name="d1", num_free_blocks=1)], Cause.KV_ROOM),
        ([worker(num_free_blocks=1), worker(name="d1")], Cause.PREFILL_COMPUTE),
    ],
)
def test_the_head_waits_for_what_no_decode_worker_has_or_else_for_a_prefill_worker(workers, cause):
    assert blocker(REQUEST, workers) is cause


def test_time_goes_to_the_reason_that_held_the_head_then():
    clock = BlockedClock()
    before = clock.read(0.0)
    clock.hold(Cause.KV_ROOM, 1.0)
    clock.hold(Cause.PREFILL_COMPUTE, 3.0)
    clock.release(3.5)
    clock.hold(Cause.KV_ROOM, 10.0)
    assert between(before, clock.read(11.0)) == {Cause.KV_ROOM: 3.0, Cause.PREFILL_COMPUTE: 0.5}
    assert clock.cause is Cause.KV_ROOM
    assert clock.is_due(11.0)
    clock.hold(Cause.KV_ROOM, 11.0)
    assert not clock.is_due(11.0)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.sampled_from([None, *Cause])), max_size=30))
def test_the_reasons_times_add_up_to_the_time_that_somebody_was_held(steps):
    clock, now, held = BlockedClock(), 0.0, 0.0
    for duration, cause in steps:
        if cause is None:
            clock.release(now)
        else:
            clock.hold(cause, now)
            held += duration
        now += duration
    assert math.isclose(sum(clock.read(now).values()), held, abs_tol=1e-9)


waits = st.tuples(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1))


@given(st.lists(waits, max_size=200))
def test_the_factor_has_bounds_whatever_was_seen(seen):
    calibration = WaitCalibration()
    for predicted_s, observed_s, weight in seen:
        calibration.observe(predicted_s, observed_s, weight)
        assert 1 / MAX_FACTOR * (1 - 1e-9) <= calibration.factor <= MAX_FACTOR * (1 + 1e-9)


@given(st.lists(waits, max_size=50), st.floats(1e-3, 1e3), st.floats(0.01, 1))
def test_a_wait_longer_than_said_raises_it_and_a_shorter_one_lowers_it(seen, predicted_s, weight):
    calibration = WaitCalibration()
    for one in seen:
        calibration.observe(*one)
    before = calibration.factor
    calibration.observe(predicted_s, predicted_s * before * 1.01, weight)
    raised = calibration.factor
    assert raised > before or before == pytest.approx(MAX_FACTOR)
    calibration.observe(predicted_s, predicted_s * raised * 0.99, weight)
    assert calibration.factor < raised


@pytest.mark.parametrize("ratio", [0.3, 1.0, 4.0])
def test_it_settles_where_the_wanted_share_of_waits_is_no_longer_than_said(ratio):
    calibration, rng = WaitCalibration(quantile=0.9), random.Random(1)
    longer = 0
    for number in range(20_000):
        predicted_s = rng.uniform(0.1, 5.0)
        observed_s = predicted_s * ratio * rng.uniform(0.5, 1.5)
        if number >= 2000:
            longer += observed_s > predicted_s * calibration.factor
        calibration.observe(predicted_s, observed_s)
    assert longer / 18_000 == pytest.approx(0.1, abs=0.02)
    assert calibration.factor == pytest.approx(1.4 * ratio, rel=0.15)


def test_it_forgets():
    calibration = WaitCalibration()
    for _ in range(100):
        calibration.observe(1.0, 5.0)
    assert calibration.factor > 4
    for _ in range(3000):
        calibration.observe(1.0, 1.0)
    assert calibration.factor < 1.2


def test_a_late_first_token_is_refused_with_when_to_come_back():
    with pytest.raises(Overloaded) as refused:
        check_deadline(10.0, 12.0, 6.5)
    assert refused.value.retry_after_s == pytest.approx(4.5)
    assert refused.value.http_status == 429


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.none() | st.floats(0, 1e6))
def test_nothing_in_time_or_unknown_is_refused(now, slack, predicted):
    check_deadline(now, math.inf, predicted)
    check_deadline(now, now + slack, None)
    if predicted is not None and now + predicted - (now + slack) <= 0:
        check_deadline(now, now + slack, predicted)


def test_a_prompt_too_long_for_the_target_is_served_only_where_it_takes_nothing_from_anyone():
    half = pool(view("a"), view("b", num_queued_tokens=9))
    assert may_be_late(0, half, 0.5)
    assert not may_be_late(1, half, 0.5)
    assert not may_be_late(0, half, 0.6)
    assert not may_be_late(0, pool(view("a")), 1.1)


def test_an_empty_pool_has_no_idle_worker():
    assert not may_be_late(0, pool(), 0.25)
    assert may_be_late(0, pool(), 0.0)


def drained(count: int, num_tokens: int = 100, every_s: float = 0.5) -> DrainRate:
    rate = DrainRate()
    rate.waiting(0.0)
    for number in range(1, count + 1):
        rate.started(num_tokens, number * every_s)
    return rate


def test_few_starts_say_nothing_and_more_say_how_long_tokens_take():
    assert drained(MIN_STARTS - 1).wait_s(1000, 10.0) == 0.0
    assert drained(40).wait_s(1000, 20.0) == pytest.approx(5.0)


def test_a_queue_that_stands_still_counts_as_slower_from_moment_to_moment():
    rate = drained(40)
    assert rate.wait_s(1000, 20.0) < rate.wait_s(1000, 25.0) < rate.wait_s(1000, 60.0)


def test_time_without_anybody_waiting_does_not_count():
    rate = drained(40)
    rate.waiting(1000.0)
    for number in range(1, 4):
        rate.started(100, 1000.0 + number * 0.5)
    assert rate.wait_s(1000, 1001.5) == pytest.approx(5.0)


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 100)), max_size=50), st.integers(0, 10**6))
def test_waits_are_never_negative_and_grow_with_the_tokens(starts, num_tokens):
    rate, now_s = DrainRate(), 0.0
    rate.waiting(now_s)
    for tokens, gap_s in starts:
        now_s += gap_s
        rate.started(tokens, now_s)
    assert 0 <= rate.wait_s(num_tokens, now_s) <= rate.wait_s(2 * num_tokens, now_s)
