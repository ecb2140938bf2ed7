"""A step planned while the one before runs: what is taken for granted, and what is waited for."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from shared.engine.finish_reason import FinishReason
from shared.engine.plan import NoToken, SampledToken, StepPlan, StepResult
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import Goal, Status
from shared.engine.speculation.ngram import NgramDrafter
from shared.engine.speculation.speculator import Speculator
from shared.kv.pool import BlockPool
from shared.sizing.step_time import StepWork
from tests.unit.engine.builders import EOS, sequence


def scheduler(num_blocks=16, max_num_batched_tokens=8):
    return Scheduler(BlockPool(num_blocks, 4), SchedulerConfig(4, max_num_batched_tokens))


def result(plan, *tokens):
    given = iter(tokens)
    return StepResult(tuple(SampledToken(next(given, 9)) for item in plan.sequences for _ in item.samples))


def shape(plan):
    return [(item.sequence_id, item.start, item.token_ids, item.pending) for item in plan.sequences]


def test_the_token_that_is_not_known_yet_is_named_by_its_row():
    s = scheduler()
    s.add(sequence("a", [2, 3]))
    s.add(sequence("b", [4, 5, 6]))
    first = s.schedule()
    second = s.schedule()
    assert shape(second) == [("a", 2, (0,), 0), ("b", 3, (0,), 1)]
    assert [item.samples[0].position for item in second.sequences] == [3, 4]
    assert [t.token.token_id for t in s.apply(first, result(first, 7, 8)).tokens] == [7, 8]
    third = s.schedule()
    assert shape(third) == [("a", 3, (0,), 0), ("b", 4, (0,), 1)]
    s.apply(second, result(second, 17, 18))
    assert s.sequences.get("a").token_ids == [2, 3, 7, 17]


def test_chunks_of_a_prompt_follow_each_other_without_waiting():
    s = scheduler(max_num_batched_tokens=4)
    s.add(sequence("a", list(range(2, 12))))
    plans = [s.schedule(), s.schedule()]
    assert [shape(p) for p in plans] == [[("a", 0, (2, 3, 4, 5), None)], [("a", 4, (6, 7, 8, 9), None)]]
    s.apply(plans[0], result(plans[0]))
    assert shape(s.schedule()) == [("a", 8, (10, 11), None)]


def test_a_sequence_whose_last_token_is_under_way_is_not_planned_again():
    s = scheduler()
    s.add(sequence("a", [2, 3], max_tokens=1))
    s.add(sequence("b", [2, 3], goal=Goal.FIRST_TOKEN))
    plan = s.schedule()
    assert s.schedule().sequences == ()
    s.apply(plan, result(plan))
    assert not s.has_work


def test_what_was_computed_behind_an_end_token_is_dropped_and_its_blocks_are_kept_until_then():
    s = scheduler()
    a = sequence("a", [2, 3, 4, 5], max_tokens=9)
    s.add(a)
    first = s.schedule()
    second = s.schedule()
    outcome = s.apply(first, result(first, EOS))
    assert [t.finish_reason for t in outcome.tokens] == [FinishReason.STOP]
    assert a.status is Status.FINISHED
    assert s.pool.num_used == 2
    again = sequence("a", [7, 8], max_tokens=9)  # the id may come again at once
    s.add(again)
    assert s.apply(second, result(second, 50)).tokens == ()
    assert s.pool.num_used == 0
    assert again.token_ids == [7, 8]


def test_an_aborted_sequence_keeps_its_blocks_while_a_step_writes_to_them():
    s = scheduler()
    s.add(sequence("a", [2, 3, 4]))
    plan = s.schedule()
    assert s.abort("a")
    assert s.pool.num_used == 1
    assert s.apply(plan, result(plan)).tokens == ()
    assert s.pool.num_used == 0


def test_nobody_is_preempted_while_a_step_runs():
    s = scheduler(num_blocks=3)
    for name in ("a", "b"):
        s.add(sequence(name, [ord(name)] * 3, max_tokens=5))
    first, second = s.schedule(), s.schedule()
    assert [len(plan.sequences) for plan in (first, second)] == [2, 2]
    s.apply(first, result(first))
    assert s.schedule().sequences == ()  # both need a second block, one is free
    assert s.counters.num_preemptions == 0
    s.apply(second, result(second))
    assert [item.sequence_id for item in s.schedule().sequences] == ["a"]
    assert s.counters.num_preemptions == 1
    s.check_integrity()


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.2}, {"bad_sequences": ((3, 4),)}])
def test_a_sequence_with_penalties_runs_ahead_and_its_tokens_are_given_once(penalty):
    s = scheduler()
    s.add(sequence("a", [2, 3], **penalty))
    plans = [s.schedule(), s.schedule()]
    s.apply(plans[0], result(plans[0], 7))
    plans.append(s.schedule())
    items = [plan.sequences[0] for plan in plans]
    assert [item.pending for item in items] == [None, 0, 0]
    given = [(item.samples[0].prompt_token_ids, item.samples[0].output_token_ids) for item in items]
    assert given == [((2, 3), ()), ((), ()), ((), ())]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_tokens_are_given_anew_behind_a_plan_that_did_not_sample(is_ahead):
    s = scheduler(num_blocks=3)
    sequences = [sequence(name, [ord(name)] * 3, max_tokens=6, repetition_penalty=1.2) for name in ("a", "b")]
    for each in sequences:
        s.add(each)
    known = {each.sequence_id: each.token_ids for each in sequences}
    before, num_anew, flying = set(), 0, []
    while s.has_work or flying:
        plan = s.schedule()
        sampled = {item.sequence_id: item for item in plan.sequences if item.samples}
        for name, item in sampled.items():
            given = [*item.samples[0].prompt_token_ids, *item.samples[0].output_token_ids]
            assert given == ([] if name in before else known[name])
            num_anew += bool(item.samples[0].output_token_ids)
        if not plan.is_empty:
            before = set(sampled)
            flying.append(plan)
        if flying and (plan.is_empty or len(flying) > is_ahead):
            s.apply(flying[0], result(flying.pop(0), 50 + num_anew))
    assert s.counters.num_preemptions > 0
    assert num_anew > 0


def test_ends_are_banned_until_min_tokens_counting_those_under_way():
    s = scheduler()
    s.add(sequence("a", [2, 3], max_tokens=9, min_tokens=2))
    plans = [s.schedule(), s.schedule()]
    assert [p.sequences[0].samples[0].banned_token_ids for p in plans] == [(EOS,), (EOS,)]
    s.apply(plans[0], result(plans[0]))
    assert s.schedule().sequences[0].samples[0].banned_token_ids == ()


def test_a_sequence_without_a_token_leaves_alone_and_takes_the_cached_prefixes_with_it():
    s = scheduler(max_num_batched_tokens=32)
    s.add(sequence("a", [2] * 9))
    s.add(sequence("b", [3] * 9))
    first = s.schedule()
    second = s.schedule()
    outcome = s.apply(first, StepResult((NoToken("layer 1 attention"), SampledToken(9))))
    (failed,) = s.take_failed()
    assert (failed.sequence_id, failed.error.details) == ("a", {"position": 9, "source": "layer 1 attention"})
    assert [t.sequence_id for t in outcome.tokens] == ["b"]
    assert s.sequences.get("a") is None
    assert s.pool.match(s.sequences.get("b").block_hashes) != []  # sealed behind the fault
    s.apply(second, result(second))
    assert s.sequences.get("b").num_output_tokens == 2
    s.check_integrity()


class Device:
    """Computes one step behind another in virtual time: 10 ms each, and `row_s` more for each guess. Answers copy their
    prompts from the fifth token on."""

    def __init__(self, speculator: Speculator, row_s: float) -> None:
        self.now_s = 0.0
        self.scheduler = Scheduler(
            BlockPool(10_000, 16), SchedulerConfig(16, 4096), lambda: self.now_s, speculator=speculator
        )
        self.num_guesses: list[int] = []
        self._row_s, self._answers = row_s, dict[str, list[int]]()
        self._running: deque[tuple[StepPlan, float]] = deque()
        self._last_s = self._free_s = 0.0

    def answer(self, name: str, num_tokens: int, rest_s: float = 0.0) -> None:
        """One request after `rest_s` in which nothing runs, up to its end."""
        self.now_s += rest_s
        self._last_s = self._free_s = self.now_s
        shuffled = Random(name)
        prompt = [2 + shuffled.randrange(5000) for _ in range(num_tokens + 8)]
        self._answers[name] = prompt[4:]
        self.scheduler.add(sequence(name, prompt + prompt[:4], max_tokens=num_tokens, ignore_eos=True))
        while self.scheduler.has_work or self._running:
            plan = self.scheduler.schedule()
            if not plan.is_empty:
                self.num_guesses.append(plan.num_guesses)
                self._free_s = max(self.now_s, self._free_s) + 0.010 + self._row_s * plan.num_guesses
                self._running.append((plan, self._free_s))
            if self._running and (plan.is_empty or len(self._running) > 1):
                self._end(*self._running.popleft())

    def _end(self, plan: StepPlan, end_s: float) -> None:
        self.now_s = end_s
        tokens = [
            SampledToken(self._answers[item.sequence_id][spec.position - item.num_prompt_tokens])
            for item in plan.sequences
            for spec in item.samples
        ]
        self.scheduler.apply(plan, StepResult(tuple(tokens)), end_s - self._last_s)
        self._last_s = end_s


@pytest.mark.parametrize("rest_s", [0.0, 5.0])
def test_how_long_steps_take_is_learned_although_all_guesses_are_right(rest_s: float) -> None:
    device = Device(Speculator([NgramDrafter()]), row_s=0.012)
    for number in range(40):
        device.answer(f"r{number}", 60, rest_s)
    found = device.scheduler.step_fit
    assert found.times is not None
    assert found.predicted_s(StepWork(1, 100)) == pytest.approx(0.010, rel=0.1)
    assert sum(map(bool, device.num_guesses)) < len(device.num_guesses) / 4, "a row takes longer than a step"


def test_guesses_that_cost_little_are_made_once_steps_are_known() -> None:
    device = Device(Speculator([NgramDrafter()]), row_s=1e-5)
    for number in range(20):
        device.answer(f"r{number}", 60)
    assert len(device.num_guesses) < 20 * 60 / 3


def test_nothing_is_planned_behind_guesses_whose_fate_is_open() -> None:
    guessing = Speculator([NgramDrafter()], num_guesses=2)
    s = Scheduler(BlockPool(16, 4), SchedulerConfig(4, 64), speculator=guessing)
    s.add(sequence("a", [2, 3, 4, 5] * 3, max_tokens=9, ignore_eos=True))
    first = s.schedule()
    s.apply(first, result(first, 2))
    second = s.schedule()
    assert shape(second) == [("a", 12, (2, 3, 4), None)]
    s.add(sequence("b", [6, 7]))
    assert s.schedule().is_empty
    s.apply(second, result(second, 3, 9, 9))  # the second guess is wrong
    assert shape(s.schedule()) == [("a", 14, (9,), None), ("b", 0, (6, 7), None)]


def steps_until_all_end(s: Scheduler, *, ahead: int) -> list[list[tuple[str, int]]]:
    """The sequences and numbers of tokens of each step."""
    flying, steps = deque[StepPlan](), []
    while s.has_work or flying:
        plan = s.schedule()
        if not plan.is_empty:
            steps.append([(item.sequence_id, len(item.token_ids)) for item in plan.sequences])
            flying.append(plan)
        if flying and (plan.is_empty or len(flying) > ahead):
            s.apply(flying[0], result(flying.popleft()))
    s.check_integrity()
    return steps


@pytest.mark.parametrize("ahead", [0, 1])
def test_of_equal_prompts_at_once_the_second_takes_what_the_first_has_computed(ahead):
    s = scheduler(num_blocks=64, max_num_batched_tokens=8)
    prompt = list(range(2, 100))  # 24 blocks of 4 and 2 tokens
    s.add(sequence("a", prompt, max_tokens=1))
    s.add(sequence("b", prompt, max_tokens=1))
    steps = steps_until_all_end(s, ahead=ahead)
    counts = [count for step in steps for name, count in step if name == "b"]
    assert sum(counts) <= 8 + 2 + 4 * ahead
    assert len(counts) <= 3 + ahead


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_of_blocks_that_arrives_is_passed_at_once(ahead):
    s = scheduler(num_blocks=64, max_num_batched_tokens=8)
    prompt = list(range(2, 100))
    s.add(sequence("a", prompt, max_tokens=1))
    first = s.schedule()
    running = s.sequences.get("a")
    arrived = s.pool.allocate(20)
    for block_id, block_hash in zip(arrived, running.block_hashes[4:24], strict=True):
        s.pool.seal(block_id, block_hash)
    s.pool.release(arrived)
    if not ahead:
        s.apply(first, result(first))
    second = s.schedule()
    assert shape(second) == [("a", 8, tuple(prompt[8:16]), None)]
    if ahead:
        s.apply(first, result(first))
        assert s.schedule().is_empty
    s.apply(second, result(second))
    assert shape(s.schedule()) == [("a", 96, tuple(prompt[96:]), None)]
