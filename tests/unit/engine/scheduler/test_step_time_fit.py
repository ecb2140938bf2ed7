"""The running least squares beside numpy's over the same steps."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from shared.engine.scheduler.step_time import FORGETTING, MIN_OBSERVATIONS, OUTLIER, BatchLimit, StepTimeModel


def steps(by_seq: float, by_token: float, count: int = 80) -> list[tuple[int, int, float]]:
    """Noisy ones, none so long that it counts as an outlier."""
    rng = Random(4)
    drawn = [(rng.randint(1, 64), rng.randint(1, 4096)) for _ in range(count)]
    return [(n, c, 0.05 + by_seq * n + by_token * c + rng.uniform(0, 0.01)) for n, c in drawn]


def fitted(seen: list[tuple[int, int, float]], *kept: int) -> np.ndarray:
    """Weighted least squares over a constant and the kept columns: [1 + len(kept)]."""
    rows = np.array([[1.0, *(step[i] for i in kept)] for step in seen])
    root = np.sqrt(FORGETTING ** np.arange(len(seen))[::-1])
    return np.linalg.lstsq(rows * root[:, None], np.array([step[2] for step in seen]) * root, rcond=None)[0]


def learnt(seen: list[tuple[int, int, float]]) -> StepTimeModel:
    model = StepTimeModel()
    for step in seen:
        model.observe(*step)
    return model


@pytest.mark.parametrize(
    ("by_seq", "by_token", "kept"), [(1e-3, 2e-5, (0, 1)), (-2e-4, 2e-5, (1,)), (1e-3, -5e-6, (0,))]
)
def test_a_prediction_is_that_of_least_squares_without_a_negative_slope(by_seq: float, by_token: float, kept) -> None:
    seen = steps(by_seq, by_token)
    model, expected = learnt(seen), fitted(seen, *kept)
    assert min(expected[1:]) > 0, "else the case tests nothing"
    for at in ((1, 10), (30, 2000), (64, 4000)):
        assert model.predict_s(*at) == pytest.approx(float(expected @ [1.0, *(at[i] for i in kept)]), rel=1e-4)


def test_of_two_that_always_grow_together_one_explains_the_time() -> None:
    seen = [(n, 100 * n, 0.01 + 1e-3 * n) for n in (1, 5, 9, 2, 7, 30, 12, 4, 8, 16)]
    assert learnt(seen).predict_s(20, 2000) == pytest.approx(0.03, rel=1e-3)


def test_steps_that_never_differ_are_predicted_to_stay_so() -> None:
    assert learnt([(4, 400, 0.02)] * 10).predict_s(64, 9000) == pytest.approx(0.02)


def test_an_outlier_counts_as_four_times_the_prediction() -> None:
    seen = [(4, 400, 0.02)] * 50
    slow, bounded = learnt([*seen, (4, 400, 99.0)]), learnt([*seen, (4, 400, OUTLIER * 0.02)])
    assert slow.predict_s(4, 400) == pytest.approx(bounded.predict_s(4, 400))
    assert slow.predict_s(4, 400) > 0.0205


def test_two_at_once_need_a_prediction_once_there_is_one() -> None:
    limit = BatchLimit(0.010)
    assert limit.admits(2, 200)
    for _ in range(MIN_OBSERVATIONS):
        limit.observe(1, 100, 0.020)
    assert limit.admits(1, 10**9)
    assert not limit.admits(2, 200)


def test_a_step_as_long_as_the_target_is_short_enough() -> None:
    limit = BatchLimit(0.5)
    for _ in range(MIN_OBSERVATIONS):
        limit.observe(4, 400, 0.5)
    assert limit.admits(4, 400)
    assert not BatchLimit(0.1).admits(3, 1)
