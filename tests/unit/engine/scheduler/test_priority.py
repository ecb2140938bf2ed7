"""Sequences of less priority give way, to those that wait and to those that grow."""

from __future__ import annotations

import pytest

from shared.engine.plan import SampledToken, StepResult
from shared.engine.scheduler.config import SchedulerConfig
from shared.engine.scheduler.scheduler import Scheduler
from shared.engine.sequence import EngineSequence, Status
from shared.kv.pool import BlockPool
from tests.unit.engine.builders import sequence
from tests.unit.engine.scheduler.test_scheduler import step


def scheduler(num_blocks: int = 6, max_num_seqs: int = 2, **policy: object) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, 4), SchedulerConfig(max_num_seqs, 32, **policy))  # type: ignore[arg-type]


def ranked(name: str, priority: int, num_tokens: int = 7, max_tokens: int = 8) -> EngineSequence:
    made = sequence(name, [2 + len(name)] * num_tokens, max_tokens=max_tokens)
    made.priority = priority
    return made


@pytest.mark.parametrize("overtaken_s", [0.0, 1.0])
def test_what_has_more_priority_is_computed_first(overtaken_s: float) -> None:
    s = scheduler(num_blocks=32, max_num_seqs=4, max_overtaken_s=overtaken_s)
    for name, priority in (("a", -100), ("b", -50), ("c", 0), ("d", 0)):
        s.add(ranked(name, priority))
    assert [name for name, *_ in step(s)[0]] == ["c", "d", "b", "a"]
    assert [running.sequence_id for running in s.sequences.running] == ["c", "d", "b", "a"]
    s.check_integrity()


@pytest.mark.parametrize(("max_num_seqs", "num_blocks"), [(1, 32), (4, 4)])
def test_a_prompt_takes_the_place_and_the_blocks_of_one_with_less(max_num_seqs: int, num_blocks: int) -> None:
    s = scheduler(num_blocks, max_num_seqs, num_host_blocks=8)
    batch, other = ranked("batch", -100, 9), ranked("interactive", 0, 9, 2)
    s.add(batch)
    step(s)
    step(s)
    s.add(other)
    assert [name for name, *_ in step(s)[0]] == ["interactive"]
    assert batch.status is Status.WAITING
    assert s.counters.num_preemptions == 1
    s.check_integrity()
    produced = len(batch.token_ids)
    while s.has_work:
        step(s)
    assert produced < len(batch.token_ids) == 9 + 8  # it came back and lost nothing
    assert s.pool.num_used == 0
    s.check_integrity()


def test_of_equal_priority_none_gives_way_to_one_that_waits() -> None:
    for priority in (0, -50):
        s = scheduler(32, 1)
        s.add(ranked("a", priority))
        step(s)
        s.add(ranked("bb", priority))
        assert [name for name, *_ in step(s)[0]] == ["a"]
        assert s.counters.num_preemptions == 0


def test_out_of_blocks_one_with_less_priority_goes_though_it_came_first() -> None:
    s = scheduler(num_blocks=6, max_num_seqs=4)
    batch, other = ranked("batch", -100, 7, 12), ranked("interactive", 0, 7, 12)
    s.add(batch)
    step(s)
    s.add(other)
    while batch.status is Status.RUNNING:
        step(s)
    assert other.status is Status.RUNNING
    while s.has_work:
        step(s)
    assert len(batch.token_ids) == len(other.token_ids) == 7 + 12
    s.check_integrity()


def test_a_step_in_flight_ends_before_anything_gives_way() -> None:
    s = scheduler(32, 1)
    s.add(ranked("batch", -100))
    plan = s.schedule()
    s.add(ranked("interactive", 0))
    assert s.schedule().is_empty
    s.apply(plan, StepResult((SampledToken(9),)))
    assert [item.sequence_id for item in s.schedule().sequences] == ["interactive"]


def test_copies_of_one_that_comes_back_are_made_though_another_one_waits_for_the_step_in_flight() -> None:
    s = scheduler(num_blocks=20, max_num_seqs=8, num_host_blocks=8)
    s.reserve(ranked("arriving", 0, 31, 30))
    moved = ranked("aa", 0, 7, 30)
    s.add(ranked("b", 0, 7, 30))
    s.add(moved)
    while not s.counters.num_swapped_out:
        step(s)
    s.pool.clear_cache()
    before = s.schedule()
    batch = ranked("batch", -100, 3)
    s.reserve(batch)
    s.join("batch", 9, {}, None)
    s.abort("arriving")
    s.add(ranked("interactive", 0, 40, 4))  # waits until `batch` gives way, which the step in flight does not allow
    plan = s.schedule()
    assert moved.status is batch.status is Status.RUNNING
    assert [copy.block_id for copy in plan.copies] == moved.block_ids[:6]
    s.check_integrity()
    s.apply(before, StepResult((SampledToken(9),)))


def served(s: Scheduler, made: EngineSequence) -> int:
    """Runs a scheduler to the end of a sequence; the tokens of it that were cached."""
    s.add(made)
    while s.has_work:
        step(s)
    s.check_integrity()
    return made.num_cached_tokens


def test_a_prefix_that_is_retained_outlives_those_that_were_used_later() -> None:
    now = 0.0
    s = Scheduler(BlockPool(12, 4, clock=lambda: now), SchedulerConfig(2, 32))
    prompt = [7] * 9

    def serve(name: str, tokens: list[int], retain_s: float = 0.0) -> int:
        made = sequence(name, tokens, max_tokens=1)
        made.retain_s = retain_s
        return served(s, made)

    def flood() -> None:
        for number in range(6):
            serve(f"flood-{number}", [20 + number] * 9)

    serve("once", prompt, 300.0)
    for _ in range(3):
        flood()
        assert serve("again", prompt) == 8
        now += 299.0
    now += 1.0
    flood()
    assert serve("late", prompt) == 0


def test_of_retained_prefixes_that_goes_first_whose_session_comes_back_last() -> None:
    now = 0.0
    s = Scheduler(BlockPool(16, 4, clock=lambda: now), SchedulerConfig(2, 64))

    def serve(name: str, tokens: list[int], session: str = "", next_turn_s: float | None = None) -> int:
        made = sequence(name, tokens, max_tokens=1)
        made.retain_s, made.session, made.next_turn_s = 300.0 if session else 0.0, session, next_turn_s
        return served(s, made)

    near, far, learnt = ([first] * 13 for first in (7, 8, 9))
    for turn in range(4):
        now += 20.0
        assert serve(f"learnt-{turn}", learnt, "learnt") == (12 if turn else 0)  # its pauses are 20 s
    serve("near", near, "near", 5.0)
    serve("far", far, "far", 60.0)
    serve("other", [10] * 37)
    assert s.pool.num_retained == 6
    assert serve("near-again", near, "near", 5.0) == 12
    assert serve("far-again", far, "far", 60.0) == 0
    now += 1.0
    serve("another", [11] * 41)
    assert [serve("last", learnt, "learnt"), serve("nearest", near, "near")] == [8, 12]
