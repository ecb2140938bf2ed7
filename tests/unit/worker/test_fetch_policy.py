"""When a prefix is fetched, and how long a request is held for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.fetch_policy import HOLD_SHARE, MIN_HOLD_S, SLOWEST, FetchPolicy

SECONDS = st.floats(1e-6, 1e3)


@given(SECONDS, SECONDS)
def test_a_request_is_never_held_for_more_than_a_share_of_computing(fetch_s, compute_s):
    policy = FetchPolicy()
    policy.note_fetch(1000, fetch_s)
    policy.note_compute(100, compute_s)
    hold_s = policy.hold_s(1000, 100)
    assert hold_s <= max(MIN_HOLD_S, HOLD_SHARE * compute_s * 1.001)
    if fetch_s < compute_s:
        assert hold_s > 0
    if fetch_s > 1.001 * SLOWEST * compute_s:
        assert hold_s == 0


def test_a_link_that_was_too_slow_is_tried_again_some_day():
    policy = FetchPolicy()
    policy.note_compute(100, 1.0)
    policy.note_fetch(1000, 100.0)
    assert any(policy.hold_s(1000, 100) > 0 for _ in range(40))


@pytest.mark.parametrize(("mode", "fetches"), [("always", True), ("never", False)])
def test_modes_for_comparison_ask_nobody(mode, fetches):
    policy = FetchPolicy(mode)
    policy.note_compute(100, 1e-6)
    policy.note_fetch(1, 1e6)
    assert (policy.hold_s(1 << 30, 16) > 0) is fetches
    assert policy.enabled is fetches
