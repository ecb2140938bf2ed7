"""Steps that take the time of a model: one behind the other, with answers that say nothing."""

from __future__ import annotations

import pytest

from shared.engine.plan import NoToken, step_work
from shared.engine.runner.timed_runner import TimedRunner
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.kv.pool import BlockPool
from shared.sizing.step_time import StepTimes
from shared.structure.structured_output import StructuredOutput, StructureKind
from tests.unit.engine.builders import sequence

TIMES = StepTimes(fixed_s=1.0, read_s=2.0, token_s=0.5, sequence_s=0.25, kv_s=0.01, attention_s=0.001)
ANSWER = (7, 8, 9)


class Clock:
    """A clock that advances when a caller sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class NoPool:
    blocks = None

    def checksums(self, block_ids: list[int]) -> list[int]:
        return [0] * len(block_ids)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runner(clock: Clock) -> TimedRunner:
    return TimedRunner(NoPool(), TIMES, ANSWER, clock, clock.sleep)


def scheduler() -> Scheduler:
    return Scheduler(BlockPool(16, 4), SchedulerConfig(max_num_batched_tokens=8))


def test_each_step_takes_the_time_of_its_work_and_answers_go_by_position(runner, clock):
    planner = scheduler()
    planner.add(sequence("a", list(range(20, 32)), max_tokens=3))
    tokens, expected_s = [], 0.0
    while planner.has_work:
        plan = planner.schedule()
        expected_s += TIMES.step_s(step_work(plan))
        output = planner.apply(plan, runner.launch(plan).result())
        tokens += [new.token.token_id for new in output.tokens]
    assert tokens == [ANSWER[position % 3] for position in (12, 13, 14)]
    assert clock.now == pytest.approx(100.0 + expected_s)


def test_a_step_launched_ahead_begins_when_the_one_before_ends(runner, clock):
    planner = scheduler()
    planner.add(sequence("a", [20, 21], max_tokens=9))
    plans = [planner.schedule() for _ in range(2)]
    first, second = [runner.launch(plan) for plan in plans]
    clock.now += 0.5  # Python's own time hides behind the first step
    first.result()
    second.result()
    assert clock.now == pytest.approx(100.0 + sum(TIMES.step_s(step_work(plan)) for plan in plans))


def test_a_structured_answer_is_refused(runner):
    planner = scheduler()
    planner.add(sequence("a", [20, 21], structured_output=StructuredOutput(StructureKind.JSON_OBJECT)))
    plan = planner.schedule()
    (token,) = runner.launch(plan).result().sampled
    assert isinstance(token, NoToken)
    assert "timed device" in token.error(2).message
