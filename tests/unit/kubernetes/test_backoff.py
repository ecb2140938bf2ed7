"""Pauses between calls to an API server that is away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.kubernetes.pod_watch import Backoff


@given(st.floats(0.01, 10), st.floats(10, 100), st.integers(1, 10_000))
def test_a_pause_doubles_within_its_bounds_and_keeps_half_of_itself_to_chance(first_s, most_s, failures):
    longest_s = min(most_s, first_s * 2.0 ** min(failures - 1, 60))
    assert longest_s / 2 <= Backoff(first_s, most_s).pause_s(failures) <= longest_s


def test_two_routers_do_not_come_back_at_one_moment():
    assert len({Backoff().pause_s(5) for _ in range(20)}) == 20
