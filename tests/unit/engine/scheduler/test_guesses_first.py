"""Guesses before a prompt's chunk: the real scheduler over steps whose times are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from shared.engine.plan import StepPlan, step_work
from shared.engine.scheduler import step_planner
from shared.engine.scheduler.scheduler import SchedulerConfig
from shared.engine.scheduler.step_planner import MOST_BEFORE_A_CHUNK, TRIES_EVERY
from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import Draft
from shared.engine.speculation.speculator import Speculator
from shared.sizing.step_time import StepTimes
from tests.unit.engine.builders import sequence
from tests.unit.engine.scheduler.timed_engine import NEXT, TimedEngine, prompt

APART = StepTimes(1e-3, 4e-3, 0.1e-3, 0.1e-3, 1e-6, 1e-7, overlap=0.0)
"""Times of steps whose products take time beside the reading of weights, as on a CPU."""
WITHIN = replace(APART, overlap=1.0)
"""Times of steps whose products take time within the reading of weights."""
ROW_S = 0.4e-3
"""Of each guess."""
TARGET_S = 0.010


class Drafter:
    """Guesses with given chances of being right."""

    method = "ngram"

    def __init__(self, chance: float, rng: Random) -> None:
        self._chance, self._rng = chance, rng
        self.num_asked = 0

    def propose(self, sequence: EngineSequence, most: int) -> Draft:
        self.num_asked += 1
        count = min(most, 4)
        is_right = [self._rng.random() < self._chance for _ in range(count)]
        return Draft(
            tuple(NEXT if right else 2 for right in is_right),
            tuple(self._chance ** (place + 1) for place in range(count)),
        )

    def forget(self, sequence_id: str) -> None:
        pass


class Engine(TimedEngine):
    """Four answers of which guesses are right by `chance`, once it is known what each guess costs."""

    def __init__(self, chance: float, times: StepTimes = APART) -> None:
        self._rng = Random(1)
        self.drafter = Drafter(chance, self._rng)
        speculator = Speculator([self.drafter], processor_clock=lambda: self.now_s)
        super().__init__(SchedulerConfig(64, 512, tpot_target_s=TARGET_S), times, speculator, ROW_S)
        self.answer("warm-up", 600)
        while self.scheduler.has_work:
            self.step()
        self.answer("a", 2000)

    def answer(self, name: str, num_tokens: int) -> None:
        for index in range(4):
            self.scheduler.add(sequence(f"{name}{index}", prompt(50, self._rng), max_tokens=num_tokens))
        self.step()

    def beside_prompts(self, num_steps: int = 400) -> Iterator[StepPlan]:
        """Steps while there is always a prompt that waits."""
        for index in range(num_steps):
            if not self.scheduler.sequences.num_waiting:
                self.scheduler.add(sequence(f"p{index}", prompt(400, self._rng), max_tokens=1))
            yield self.step()


def prompt_tokens_a_second(engine: Engine) -> float:
    begin_s = engine.now_s
    return sum(step_work(plan).num_chunk_tokens for plan in engine.beside_prompts() if not plan.num_guesses) / (
        engine.now_s - begin_s
    )


@pytest.mark.parametrize(("times", "least"), [(APART, 1.2), (WITHIN, 0.99)])
def test_prompts_come_sooner_where_answers_get_ahead_by_guesses_between_their_chunks(times, least, monkeypatch):
    rate = prompt_tokens_a_second(Engine(0.9, times))
    monkeypatch.setattr(step_planner, "MOST_BEFORE_A_CHUNK", 0)
    assert rate > least * prompt_tokens_a_second(Engine(0.9, times))


def test_a_prompt_waits_for_few_steps_of_guesses_in_a_row():
    num_before, most = 0, 0
    for plan in Engine(chance=0.9).beside_prompts():
        num_before = num_before + 1 if plan.num_guesses else 0
        most = max(most, num_before)
    assert 1 <= most <= MOST_BEFORE_A_CHUNK


def test_no_chunk_waits_where_it_costs_little_beside_answers():
    engine = Engine(0.9, WITHIN)
    assert any(engine.step().num_guesses for _ in range(50)), "guesses are made where no prompt waits"
    before = engine.drafter.num_asked
    assert not any(plan.num_guesses for plan in engine.beside_prompts(400))
    assert engine.drafter.num_asked - before <= 4 * 400 / TRIES_EVERY, "four answers, and few steps that ask"
