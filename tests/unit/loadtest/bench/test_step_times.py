"""Rates of ways to guess, from the times of kinds of steps."""

from __future__ import annotations

import random

import pytest

from loadtest.bench.speculation.given_answers import StepTimes
from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.sampling_params import SamplingParams

SAMPLING = SamplingParams(max_tokens=9, seed=0)


def step(num_guesses: int, num_tokens: int = 1) -> StepPlan:
    tokens = (7,) * (num_tokens + num_guesses)
    samples = tuple(SampleSpec(SAMPLING, 8 + place) for place in range(1 + num_guesses))
    return StepPlan((PlannedSequence("a", tokens, 8 - num_tokens, (0,), 4, samples=samples),))


def run(times: StepTimes, way: str, steps: list[tuple[int, float]], speed: float, before_s: float = 0.01) -> None:
    """Steps of (guesses, seconds) on a machine of that speed."""
    times.begin_run(way)
    at_s = 100.0
    times.ended(step(0, num_tokens=4), 0, at_s - 50.0, at_s, 1)  # the prompt
    for num_guesses, step_s in steps:
        times.ended(step(num_guesses), 0, at_s + before_s, at_s + before_s + step_s / speed, 1 + num_guesses)
        at_s += before_s + step_s / speed


def test_a_busy_machine_changes_no_ratio_and_each_way_has_its_own_time_before_a_step() -> None:
    times, rng = StepTimes(), random.Random(0)
    for number in range(6):
        plain = [(0, 1.0)] * 30
        guessed = [(2, 1.2) if place % 5 == 0 else (0, 1.0) for place in range(25)]
        # The ways' runs are disturbed by up to half, and never alike.
        run(times, "off", plain, rng.uniform(0.5, 1.0))
        run(times, "auto", guessed, rng.uniform(0.5, 1.0), before_s=0.03 if number % 2 else 0.05)
    found = times.run_s()
    speed = found["off"] / (30 * 1.01)
    assert found["auto"] / found["off"] == pytest.approx((20 * 1.0 + 5 * 1.2 + 25 * 0.04) / (30 * 1.01), rel=0.02)
    assert 1.0 < speed < 2.0
    assert (times.num_steps("off"), times.num_steps("auto")) == (30, 25)
    rates = times.rates(1)
    assert rates["off"] == pytest.approx(30 / found["off"])
    assert rates["auto"] == pytest.approx((20 + 5 * 3) / found["auto"])
    assert not any(times.rates(2).values())


def test_steps_of_two_models_are_of_different_kinds() -> None:
    times = StepTimes()
    times.begin_run("small")
    for runner, step_s in ((1, 1.0), (2, 3.0)) * 4:
        times.ended(step(0), runner, 0.0, step_s, 1)
    times.begin_run("large")
    times.ended(step(0), 2, 0.0, 3.0, 1)
    assert times.run_s()["large"] > 0
    assert {kind.runner for kind in times._kinds_s()} == {1, 2}
