"""Differences of pairs, and the bounds of their median."""

from __future__ import annotations

import random

import pytest

from loadtest.bench.traces.pairs import SAMPLES, more, order, results_of


def test_a_slow_round_does_not_weigh_the_difference() -> None:
    costs = [[10.0, 10.1, 10.5], [30.0, 30.1, 30.5], [10.0, 10.1, 10.5]]
    assert more(costs, 2).middle == pytest.approx(5.0)
    assert more(costs, 1).middle == pytest.approx(1.0)


def test_the_bounds_hold_the_truth_in_nineteen_of_twenty_measurements() -> None:
    drawn = random.Random(7)
    held = 0
    for _ in range(400):
        rounds = ([10 + drawn.gauss(0, 1), 0.0, 10.3 + drawn.gauss(0, 1)] for _ in range(25))
        found = more(list(rounds), 2)
        held += found.low <= 3.0 <= found.high
    assert 0.92 <= held / 400 <= 0.99


def test_few_rounds_have_their_extremes_as_bounds() -> None:
    found = more([[10.0, 0.0, 9.0], [10.0, 0.0, 12.0], [10.0, 0.0, 10.0]], 2)
    assert (found.low, found.middle, found.high) == pytest.approx((-10.0, 0.0, 20.0))


def test_each_share_begins_a_round_as_often() -> None:
    begins = [order(turn)[0] for turn in range(3 * len(SAMPLES))]
    assert sorted(begins) == sorted(3 * list(range(len(SAMPLES))))
    assert all(sorted(order(turn)) == list(range(len(SAMPLES))) for turn in range(-2, 4))


def test_the_goal_is_beside_the_middle_and_the_upper_bound() -> None:
    limits = [result.limit for result in results_of("x", "ms", [[1.0, 1.0, 1.0]])]
    assert limits == [None, 2.0, None, 2.0, 5.0, None, 5.0]
