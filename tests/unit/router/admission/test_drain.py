"""The queue's own speed is learnt from those that had to wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.controller import MIN_STARTS, DrainRate


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
