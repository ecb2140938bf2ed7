"""The factor of predicted waits follows what waits came to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.controller import MAX_FACTOR, WaitCalibration

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
