"""Arrival processes: rates, shapes, and that a seed says everything."""

from __future__ import annotations

from itertools import islice, takewhile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadtest.arrivals import Arrivals, Constant, Gamma, Ramp
from shared.errors import ConfigError

PROCESSES = [Gamma(5), Gamma(5, 0.3), Gamma(5, 4.0), Gamma(5, 1.0, 20.0), Constant(5), Ramp(1, 9, 20.0)]


def first(process: Arrivals, count: int, seed: int = 0) -> np.ndarray:
    return np.array(list(islice(process.offsets(np.random.default_rng(seed)), count)))


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_the_same_seed_gives_the_same_times_and_they_never_go_back(process: Arrivals) -> None:
    times = first(process, 500, seed=7)
    assert (times == first(process, 500, seed=7)).all()
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0


def test_another_seed_gives_other_times() -> None:
    assert (first(Gamma(5), 50, seed=1) != first(Gamma(5), 50, seed=2)).any()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(burstiness: float) -> None:
    gaps = np.diff(first(Gamma(10, burstiness), 20_000))
    assert gaps.mean() == pytest.approx(0.1, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_arrivals_start_at_once_and_keep_the_beat() -> None:
    assert first(Constant(4), 5).tolist() == [0, 0.25, 0.5, 0.75, 1.0]


@settings(max_examples=40)
@given(rate=st.floats(0.1, 20), over_s=st.floats(1, 20), burstiness=st.floats(0.2, 5), seed=st.integers(0, 1000))
@example(rate=11.25, over_s=11.1875, burstiness=0.21875, seed=616)  # the last gap is lost in rounding
def test_gamma_over_a_time_offers_exactly_the_rate(rate: float, over_s: float, burstiness: float, seed: int) -> None:
    process = Gamma(rate, burstiness, over_s)
    times = process.offsets(np.random.default_rng(seed))
    within = list(takewhile(lambda at_s: at_s < over_s, times))
    assert len(within) == max(1, round(rate * over_s))


def test_gamma_over_a_time_goes_on_behind_it() -> None:
    times = first(Gamma(5, 1.0, 10.0), 200)
    assert times[50] == 10.0
    assert times[-1] > 25


def test_a_ramp_has_the_rate_of_each_moment() -> None:
    counts = np.zeros(10)
    for seed in range(200):
        times = np.array(
            list(takewhile(lambda at_s: at_s < 10, Ramp(0, 20, 10.0).offsets(np.random.default_rng(seed))))
        )
        counts += np.histogram(times, bins=10, range=(0, 10))[0]
    expected = np.array([1, 3, 5, 7, 9, 11, 13, 15, 17, 19]) * 200
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_a_ramp_keeps_its_last_rate_and_one_to_zero_ends() -> None:
    behind = first(Ramp(0, 10, 1.0), 3000)
    assert np.diff(behind[behind > 1]).mean() == pytest.approx(0.1, rel=0.1)
    assert max(Ramp(10, 0, 5.0).offsets(np.random.default_rng(1))) <= 5.0


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Gamma(0), "rate"),
        (lambda: Gamma(float("nan")), "rate"),
        (lambda: Gamma(1, -1), "burstiness"),
        (lambda: Constant(-2), "rate"),
        (lambda: Ramp(0, 0, 10), "ramp_to"),
        (lambda: Ramp(1, 2, 0), "duration"),
    ],
)
def test_rates_that_make_no_sense_are_refused_by_name(build: object, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build()  # type: ignore[operator]
    assert raised.value.field == field
