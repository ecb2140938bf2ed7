"""The batch that keeps the target, by the times of all steps so far."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shared.engine.plan import SampledToken, StepResult, step_work
from shared.engine.scheduler.block_admission import SMALL_BATCH, BatchLimit
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import Goal
from shared.errors import Overloaded
from shared.kv.pool import BlockPool
from shared.sizing.step_fit import MIN_STEPS, StepTimeFit
from shared.sizing.step_time import BATCH_GAIN, StepWork
from tests.examples import examples
from tests.unit.engine.builders import sequence


class Measured:
    """A limit, and the fit that it asks."""

    def __init__(self, target_s: float) -> None:
        self.fit = StepTimeFit()
        self.limit = BatchLimit(target_s, self.fit)

    def step(self, work: StepWork, seconds: float, times: int = 1) -> None:
        for _ in range(times):
            self.fit.observe(work, seconds)
            self.limit.measured(work)


@given(st.floats(0.005, 0.05), st.floats(1e-4, 5e-3), st.floats(0.006, 0.2))
@examples(50)
def test_a_growing_batch_stops_where_the_target_is_reached(fixed, by_seq, target):
    assume(not 0.98 < target / (fixed + by_seq) < 1.02)  # where it is by luck whether an answer alone is late
    measured, batch = Measured(target), 1
    for _ in range(300):
        measured.step(StepWork(batch, 100 * batch), fixed + by_seq * batch)
        if measured.limit.admits(batch + 1, 100 * (batch + 1)):
            batch += 1
    if target < fixed + by_seq:  # even an answer alone is late
        target = BATCH_GAIN * (fixed + by_seq)
    best = max(1, int((target - fixed) / by_seq + 1e-6))
    assert min(best, 250) - 1 <= batch <= max(3, 1.1 * best + 1)


def test_a_batch_is_at_most_twice_the_largest_measured():
    measured = Measured(10.0)
    assert [measured.limit.admits(size, 1) for size in (1, 2, 3)] == [True, True, False]
    measured.step(StepWork(1, 1), 0.001, MIN_STEPS)
    assert [measured.limit.admits(size, 1) for size in (SMALL_BATCH, SMALL_BATCH + 1)] == [True, False]
    measured.step(StepWork(5, 1), 0.001, 10 * MIN_STEPS)
    assert [measured.limit.admits(size, 1) for size in (10, 11)] == [True, False]


def test_prompts_for_other_workers_take_a_place_and_no_time_of_later_steps():
    """A step of n sequences takes n ms, the target is 5 ms."""
    s = Scheduler(BlockPool(400, 4), SchedulerConfig(12, 8, tpot_target_s=0.005))
    for i in range(3):
        s.add(sequence(f"a{i}", [2, 3, i + 4], max_tokens=200))
    for _ in range(30):
        plan = s.schedule()
        s.apply(plan, StepResult((SampledToken(9),) * len(plan.sequences)), len(plan.sequences) / 1e3)
    for i in range(6):
        s.add(sequence(f"p{i}", list(range(2, 200)), max_tokens=1, goal=Goal.FIRST_TOKEN))
    s.schedule()
    assert 0 < reserved_until_refused(s) < 4


def test_steps_with_chunks_tell_of_the_batch_too():
    """Beside steady chunks no step only decodes, and yet the batch is known."""
    measured = Measured(0.012)
    for count in range(200):
        batch, chunk = 1 + count % 8, 4 << count % 5
        work = StepWork(batch, 200 * batch).with_chunk(chunk, 0)
        measured.step(work, 0.005 + 0.0005 * work.num_tokens)
    assert measured.limit.admits(12, 12 * 200)
    assert not measured.limit.admits(16, 16 * 200)


def test_two_at_once_need_a_prediction_once_there_is_one():
    measured = Measured(0.010)
    assert measured.limit.admits(2, 200)
    measured.step(StepWork(1, 100), 0.008, MIN_STEPS)
    measured.step(StepWork(2, 200), 0.012, MIN_STEPS)
    assert measured.limit.admits(1, 10**9)
    assert not measured.limit.admits(2, 200)


def test_where_an_answer_alone_is_late_a_batch_may_take_twice_as_long():
    measured = Measured(0.010)
    for batch in (1, 2, 3, 4):
        measured.step(StepWork(batch, 100 * batch), 0.012 + 0.003 * batch, 20)
    assert measured.limit.admits(5, 500)
    assert not measured.limit.admits(8, 800)


def test_without_a_target_nothing_is_bounded():
    assert BatchLimit(0.0, StepTimeFit()).admits(10_000, 10**9)


def test_the_scheduler_lets_the_batch_grow_up_to_the_target():
    """A step of n sequences takes n ms, the target is 5 ms."""
    s = Scheduler(BlockPool(400, 4), SchedulerConfig(64, 256, tpot_target_s=0.005))
    for i in range(12):
        s.add(sequence(f"s{i}", [2, 3, i + 4], max_tokens=60))
    sizes = []
    for _ in range(80):
        plan = s.schedule()
        s.apply(plan, StepResult((SampledToken(9),) * len(plan.sequences)), len(plan.sequences) / 1e3)
        sizes.append(len(plan.sequences))
    assert sizes[:2] == [2, 2]
    assert sizes[-1] in (4, 5)
    assert reserved_until_refused(s) < 3


def test_a_plan_is_counted_as_the_model_of_step_times_has_it():
    s = Scheduler(BlockPool(100, 4), SchedulerConfig(8, 16))
    s.add(sequence("short", [2, 3, 4], max_tokens=60))
    s.apply(s.schedule(), StepResult((SampledToken(9),)))
    s.add(sequence("long", list(range(2, 42)), max_tokens=60))
    assert step_work(s.schedule()) == StepWork(1, 4).with_chunk(15, 0)


def reserved_until_refused(scheduler: Scheduler) -> int:
    """Answers that fit beside those that run."""
    for count in range(20):
        try:
            scheduler.reserve(sequence(f"late{count}", [2, 3], max_tokens=4))
        except Overloaded:
            return count
    pytest.fail("no bound was met")
