"""How long a step takes by what was measured, and the batch that keeps the target."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.plan import SampledToken, StepResult
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.scheduler.step_time import MIN_OBSERVATIONS, BatchLimit, StepTimeModel
from shared.errors import Overloaded
from shared.kv.pool import BlockPool
from tests.unit.engine.builders import sequence


@pytest.mark.parametrize("seed", range(20))
def test_times_that_are_linear_are_found_again(seed):
    model, rng = StepTimeModel(), Random(seed)
    fixed, by_seq, by_token = rng.uniform(0.01, 0.1), rng.uniform(1e-5, 1e-3), rng.uniform(1e-7, 1e-5)
    for _ in range(60):
        batch, context = rng.randint(1, 64), rng.randint(1, 4096)
        model.observe(batch, context, fixed + by_seq * batch + by_token * context)
    for batch, context in ((1, 100), (64, 4096), (100, 8000)):
        expected = fixed + by_seq * batch + by_token * context
        assert model.predict_s(batch, context) == pytest.approx(expected, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4096), st.floats(1e-4, 1)), min_size=MIN_OBSERVATIONS))
def test_a_prediction_grows_with_batch_and_context_whatever_was_measured(steps):
    model = StepTimeModel()
    for step in steps:
        model.observe(*step)
    at = [model.predict_s(batch, context) for batch, context in ((1, 1), (9, 1), (9, 500), (90, 500), (90, 9000))]
    assert all(a <= b + 1e-9 for a, b in pairwise(at))
    assert min(at) >= 0


def test_a_machine_that_became_slower_is_believed_and_one_slow_step_is_not():
    model = StepTimeModel()
    for _ in range(100):
        model.observe(8, 800, 0.010)
    model.observe(8, 800, 3.0)
    assert model.predict_s(8, 800) < 0.011
    for _ in range(400):
        model.observe(8, 800, 0.030)
    assert model.predict_s(8, 800) == pytest.approx(0.030, rel=0.02)


def test_too_few_measurements_say_nothing():
    model = StepTimeModel()
    for _ in range(MIN_OBSERVATIONS - 1):
        model.observe(1, 1, 1.0)
    assert model.predict_s(1, 1) is None


@given(st.floats(0.005, 0.05), st.floats(1e-4, 5e-3), st.floats(0.006, 0.2))
def test_a_growing_batch_stops_where_the_target_is_reached(fixed, by_seq, target):
    limit, batch = BatchLimit(target), 1
    for _ in range(300):
        limit.observe(batch, 100 * batch, fixed + by_seq * batch)
        if limit.admits(batch + 1, 100 * (batch + 1)):
            batch += 1
    best = max(1, int((target - fixed) / by_seq + 1e-6))
    assert min(best, 250) - 1 <= batch <= max(3, best + 1)  # the slope is known from 1 and 2 sequences on


def test_a_batch_is_at_most_twice_the_largest_measured():
    limit = BatchLimit(10.0)
    assert [limit.admits(size, 1) for size in (1, 2, 3)] == [True, True, False]
    for _ in range(MIN_OBSERVATIONS):
        limit.observe(5, 1, 0.001)
    assert [limit.admits(size, 1) for size in (10, 11)] == [True, False]


def test_without_a_target_nothing_is_bounded():
    assert BatchLimit(0.0).admits(10_000, 10**9)


def test_the_scheduler_lets_the_batch_grow_up_to_the_target():
    """A step of n sequences takes n ms, the target is 5 ms."""
    s = Scheduler(BlockPool(400, 4), SchedulerConfig(64, 256, tpot_target_s=0.005))
    for i in range(12):
        s.add(sequence(f"s{i}", [2, 3, i + 4], max_tokens=60))
    sizes = []
    for _ in range(50):
        plan = s.schedule()
        s.apply(plan, StepResult((SampledToken(9),) * len(plan.sequences)), len(plan.sequences) / 1e3)
        sizes.append(len(plan.sequences))
    assert sizes[:2] == [2, 2]
    assert sizes[-1] in (4, 5)
    with pytest.raises(Overloaded, match="5 ms"):
        s.reserve(sequence("late", [2, 3], max_tokens=4))
