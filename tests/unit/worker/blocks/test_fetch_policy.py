"""When a prefix is fetched, and how long a request is held for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.blocks.prefix_fetch.fetch_policy import (
    HOLD_SHARE,
    MARGIN,
    MAX_LINKS,
    MIN_HOLD_S,
    SLOWEST,
    UNKNOWN_HOLD_S,
    FetchPolicy,
)

SECONDS = st.floats(1e-6, 1e3)


@given(SECONDS, SECONDS)
def test_a_request_is_never_held_for_more_than_a_share_of_computing(fetch_s, compute_s):
    policy = FetchPolicy()
    policy.note_fetch("a", 1000, fetch_s)
    policy.note_compute(100, compute_s)
    assert 0 < policy.hold_s({"a": 1000}, 100) <= max(MIN_HOLD_S, compute_s * 1.001)
    pays = policy.pays("a", 1000, 100)
    if fetch_s < compute_s:
        assert pays
    if fetch_s > 1.001 * SLOWEST * compute_s:
        assert not pays


def test_a_fetch_that_ends_soon_is_waited_for_and_a_slow_one_computed_beside():
    policy = FetchPolicy()
    assert policy.hold_s({"a": 1000}, 100) == UNKNOWN_HOLD_S
    policy.note_compute(100, 1.0)
    assert policy.hold_s({"a": 1000}, 100) == pytest.approx(HOLD_SHARE)
    policy.note_fetch("a", 1000, 0.2)
    policy.note_fetch("b", 1000, 0.8)
    assert policy.hold_s({"a": 1000}, 100) == pytest.approx(MARGIN * 0.2)
    assert policy.hold_s({"a": 1000, "b": 100}, 100) == pytest.approx(MARGIN * 0.2)  # side by side
    assert policy.hold_s({"a": 1000, "b": 1000}, 100) == MIN_HOLD_S
    assert policy.hold_s({"a": 1000, "c": 1}, 100) == pytest.approx(HOLD_SHARE)


def test_a_link_that_was_too_slow_is_tried_again_some_day_and_says_nothing_of_others():
    policy = FetchPolicy()
    policy.note_compute(100, 1.0)
    policy.note_fetch("a", 1000, 100.0)
    assert policy.pays("b", 1000, 100)
    assert any(policy.pays("a", 1000, 100) for _ in range(40))


def test_links_that_were_not_used_for_longest_are_forgotten():
    policy = FetchPolicy()
    policy.note_compute(100, 1.0)
    for number in range(MAX_LINKS + 1):
        policy.note_fetch(f"{number}", 1000, 1e6)
    assert policy.pays("0", 1000, 100)
    assert not policy.pays("1", 1000, 100)


@pytest.mark.parametrize(("mode", "fetches"), [("always", True), ("never", False)])
def test_modes_for_comparison_ask_nobody(mode, fetches):
    policy = FetchPolicy(mode)
    policy.note_compute(100, 1e-6)
    policy.note_fetch("a", 1, 1e6)
    assert policy.enabled is policy.pays("a", 1 << 30, 16) is fetches
