"""The real scheduler in virtual time: each step takes exactly what a model of its time says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest

from shared.engine.plan import SampledToken, StepPlan, StepResult, decode_work, step_work
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.speculation.speculator import Speculator
from shared.kv.pool import BlockPool
from shared.sizing.step_fit import StepTimeFit
from shared.sizing.step_time import StepTimes, StepWork

NEXT = 9
"""Every token of every answer."""


@dataclass
class Ran:
    """A step, as it was."""

    work: StepWork
    seconds: float
    slack_s: float | None
    """The least, before it."""


class TimedEngine:
    """A scheduler, and a clock that its steps move."""

    def __init__(
        self, config: SchedulerConfig, times: StepTimes, speculator: Speculator | None = None, row_s: float = 0.0
    ) -> None:
        """A step takes `times`, and `row_s` for each guess. Predictions stay exact: nothing is learnt of steps."""
        self.times, self.row_s = times, row_s
        self.now_s = 0.0
        self.ran: list[Ran] = []
        fit = StepTimeFit(times)
        fit.observe = lambda work, seconds: None
        self.scheduler = Scheduler(BlockPool(6000, 16), config, lambda: self.now_s, fit, speculator=speculator)

    def step(self) -> StepPlan:
        scheduler = self.scheduler
        slack_s, plan = scheduler.least_slack_s(scheduler.sequences.work.decoding), scheduler.schedule()
        only_decodes = all(item.is_decode for item in plan.sequences)
        work = decode_work(plan.sequences) if only_decodes else step_work(plan)
        seconds = self.times.step_s(work) + self.row_s * plan.num_guesses
        self.now_s += seconds
        count = sum(len(item.samples) for item in plan.sequences)
        scheduler.apply(plan, StepResult((SampledToken(NEXT),) * count), seconds)
        self.ran.append(Ran(work, seconds, slack_s))
        return plan

    def until_idle(self, most: int = 20_000) -> Iterator[StepPlan]:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            yield self.step()
        pytest.fail("a sequence never ended")


def prompt(length: int, rng: Random) -> list[int]:
    """Tokens that no answer has."""
    return [rng.randint(NEXT + 1, 10_000) for _ in range(length)]
