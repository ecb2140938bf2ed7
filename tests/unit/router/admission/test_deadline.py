"""What cannot be in time is refused, and nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.controller import check_deadline, may_be_late
from shared.errors import Overloaded
from tests.unit.router.placement.builders import pool, view


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
