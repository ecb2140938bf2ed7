"""Intervals hold the truth as often as they say, and nothing is named that they do not show."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.baseline.pairs import Interval, ratio_interval, t_quantile, verdict

NUM_STUDIES = 200


def study(
    rng: np.random.Generator, attainments: tuple[float, float], rounds: int, requests: int, drift: float
) -> list[list[list[bool]]]:
    """Two systems under the same requests. A request is good where its own difficulty, which both systems face, what
    is by chance, and what the machine does to its whole window together stay below a limit."""
    difficulty = rng.normal(size=(rounds, requests))
    systems = []
    for attainment in attainments:
        chance = 0.5 * rng.normal(size=(rounds, requests))
        machine = drift * rng.normal(size=(rounds, 1))
        limit = NormalDist().inv_cdf(attainment) * math.sqrt(1 + 0.5**2 + drift**2)
        systems.append((difficulty + chance + machine < limit).tolist())
    return systems


@pytest.mark.parametrize("rounds", [4, 8, 16])
@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("attainments", [(0.9, 0.9), (0.7, 0.8), (0.98, 0.9)])
def test_the_interval_holds_the_truth_in_about_95_of_100_studies(
    attainments: tuple[float, float], drift: float, rounds: int
) -> None:
    rng = np.random.default_rng([rounds, int(10 * drift)])
    truth, held = attainments[0] / attainments[1], 0
    for _ in range(NUM_STUDIES):
        found = ratio_interval(*study(rng, attainments, rounds, 38, drift))
        assert found is not None
        held += found.low <= truth <= found.high
    assert 0.91 <= held / NUM_STUDIES < 1.0  # in every study would be too wide


def test_a_machine_that_drifts_makes_the_interval_wider() -> None:
    rng = np.random.default_rng(5)
    steady, drifting = (
        np.mean([ratio_interval(*study(rng, (0.9, 0.9), 8, 38, drift)).half_width for _ in range(50)])  # type: ignore[union-attr]
        for drift in (0.0, 0.5)
    )
    assert drifting > 1.5 * steady


rounds_of = st.integers(2, 6).flatmap(
    lambda rounds: st.lists(
        st.lists(st.tuples(st.booleans(), st.booleans()), min_size=3, max_size=8), min_size=rounds, max_size=rounds
    )
)


@given(rounds_of)
def test_the_interval_holds_the_ratio_and_a_system_against_itself_gives_1(
    pairs: list[list[tuple[bool, bool]]],
) -> None:
    of, to = ([[pair[side] for pair in window] for window in pairs] for side in (0, 1))
    found, turned, same = ratio_interval(of, to), ratio_interval(to, of), ratio_interval(of, of)
    if found is not None and turned is not None:
        assert 0 <= found.low < found.ratio < found.high
        assert found.ratio == pytest.approx(1 / turned.ratio)
    if same is not None:
        least = 3 / sum(map(len, of))
        assert (same.ratio, same.low, same.high) == (1.0, max(1 - least, 0.0), 1 + least)


def test_where_all_requests_are_good_the_interval_is_what_their_number_can_show() -> None:
    found = ratio_interval([[True] * 50] * 6, [[True] * 50] * 6)
    assert found == Interval(1.0, pytest.approx(0.99), pytest.approx(1.01))


def test_without_two_rounds_or_a_good_request_there_is_no_interval() -> None:
    assert ratio_interval([[True]], [[True]]) is None
    assert ratio_interval([[True], [True]], [[False], [False]]) is None
    with pytest.raises(ValueError, match="same requests"):
        ratio_interval([[True], [True]], [[True], [True, False]])


SAME = Interval(1.0, 0.96, 1.05)


@pytest.mark.parametrize(
    ("interval", "same", "num_requests", "text"),
    [
        (Interval(1.2, 1.1, 1.3), SAME, 300, "better"),
        (Interval(0.8, 0.7, 0.9), SAME, 300, "worse"),
        (Interval(1.04, 1.01, 1.07), SAME, 300, "no difference, within ±3.0%"),
        (Interval(0.97, 0.9, 0.99), SAME, 300, "not resolved: ±7%"),
        (Interval(1.0, 0.8, 1.25), SAME, 300, "not resolved: ±25%"),
        (Interval(1.2, 1.1, 1.3), SAME, 299, "not resolved: 299 requests, 300 wanted"),
        (Interval(1.2, 1.1, 1.3), None, 300, "not resolved: the same system twice was not compared"),
        (None, SAME, 300, "not resolved: fewer than two rounds, or no good request"),
        (Interval(1.2, 1.1, 1.3), Interval(1.15, 1.1, 1.21), 300, "not resolved: ±10%"),
    ],
)
def test_a_winner_is_named_only_outside_of_what_one_system_differs_from_itself(
    interval: Interval | None, same: Interval | None, num_requests: int, text: str
) -> None:
    found = verdict(interval, same, num_requests, wanted=300, within=0.05)
    assert found.text == text
    assert found.resolved != text.startswith("not resolved")


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (15, 2.1314), (60, 2.0003)]
)
def test_students_t_is_that_of_the_tables(degrees: int, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, rel=2e-3)
