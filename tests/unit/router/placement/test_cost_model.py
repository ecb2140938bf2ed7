"""The fit beside numpy's least squares over the same observations."""

from __future__ import annotations

import numpy as np
import pytest

from services.router.placement.prediction import FORGETTING, MIN_OBSERVATIONS, CostModel
from services.router.placement.views import NO_WORK, Work

AHEAD = (NO_WORK, Work.of(300, 0), Work.of(1000, 500))
OWN = [Work.of(20 + 37 * n % 900, 250 * (n % 5)) for n in range(60)]
SEEN = [(AHEAD[n % 3], own, 0.02 + 1e-4 * own.tokens + 3e-8 * own.pairs + 0.01 * (n % 7)) for n, own in enumerate(OWN)]


def features(ahead: Work, own: Work) -> list[float]:
    return [1.0, ahead.tokens + own.tokens, 1e-6 * (ahead.pairs + own.pairs)]


def fitted(seen: list[tuple[Work, Work, float]]) -> np.ndarray:
    """Least squares of relative errors with forgetting: [3]."""
    rows = np.array([features(ahead, own) for ahead, own, _ in seen])
    age = np.arange(len(seen))[::-1]
    weight = np.sqrt(FORGETTING**age) / (rows[:, 1] + 256)
    seconds = np.array([each[2] for each in seen])
    return np.linalg.lstsq(rows * weight[:, None], seconds * weight, rcond=None)[0]


def learnt(seen: list[tuple[Work, Work, float]]) -> CostModel:
    model = CostModel()
    for each in seen:
        model.observe(*each)
    return model


def test_a_prediction_is_that_of_weighted_least_squares() -> None:
    model, expected = learnt(SEEN), fitted(SEEN)
    assert min(expected) > 0, "else the case tests nothing"
    for ahead, own, _ in SEEN[::7]:
        assert model.predict_s(ahead, own) == pytest.approx(float(expected @ features(ahead, own)), rel=1e-4)


def test_a_token_costs_the_recent_seconds_over_the_recent_tokens() -> None:
    tokens = seconds = 0.0
    for ahead, own, took_s in SEEN:
        tokens = FORGETTING * tokens + ahead.tokens + own.tokens
        seconds = FORGETTING * seconds + took_s
    assert learnt(SEEN).token_s == pytest.approx(seconds / tokens)


def test_nothing_is_predicted_before_enough_was_seen() -> None:
    few, enough = learnt(SEEN[: MIN_OBSERVATIONS - 1]), learnt(SEEN[:MIN_OBSERVATIONS])
    assert (few.token_s, few.predict_s(NO_WORK, Work(9))) == (None, None)
    assert enough.token_s is not None
    assert enough.predict_s(NO_WORK, Work(9)) is not None
    assert enough.num_observations == MIN_OBSERVATIONS


def test_a_fit_serves_a_sixteenth_newer_observations_and_the_next_one_changes_it() -> None:
    model, slow = learnt(SEEN), (NO_WORK, Work.of(500, 0), 60.0)
    before = model.predict_s(NO_WORK, Work.of(500, 0))
    for _ in range(len(SEEN) // 16):
        model.observe(*slow)
        assert model.predict_s(NO_WORK, Work.of(500, 0)) == before
    model.observe(*slow)
    after = model.predict_s(NO_WORK, Work.of(500, 0))
    assert before is not None
    assert after is not None
    assert after > before + 0.1
    assert after == learnt([*SEEN, *[slow] * (len(SEEN) // 16 + 1)]).predict_s(NO_WORK, Work.of(500, 0))


def test_a_fit_serves_at_most_seven_newer_observations() -> None:
    model, slow = learnt(SEEN * 3), (NO_WORK, Work.of(500, 0), 60.0)
    predicted = [model.predict_s(NO_WORK, Work.of(500, 0))]
    for _ in range(8):
        model.observe(*slow)
        predicted.append(model.predict_s(NO_WORK, Work.of(500, 0)))
    assert predicted[:-1] == predicted[:1] * 8
    assert predicted[-1] != predicted[0]


def test_a_term_that_would_be_negative_is_left_out() -> None:
    """Long prompts that took less time than short ones: only the fixed cost remains."""
    model = learnt([(NO_WORK, Work(n, 0.0), 1.0 - 1e-4 * n) for n in range(100, 1000, 30)])
    assert model.predict_s(NO_WORK, Work(10_000, 0.0)) == pytest.approx(model.predict_s(NO_WORK, Work(10, 0.0)))


def test_what_is_proportional_to_tokens_alone_is_predicted_as_such() -> None:
    model = learnt([(NO_WORK, Work(n, 0.0), 2e-3 * n) for n in range(100, 1000, 30)])
    assert model.predict_s(Work(300, 0.0), Work(400, 0.0)) == pytest.approx(1.4, rel=1e-4)


def test_prompts_that_took_no_time_are_predicted_to_take_none() -> None:
    assert learnt([(NO_WORK, Work(n, 0.0), 0.0) for n in range(20)]).predict_s(NO_WORK, Work(9)) == 0.0
