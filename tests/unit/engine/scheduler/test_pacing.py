"""Chunks beside running answers: the real scheduler over steps whose times are known exactly."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.engine.scheduler.block_admission import OutputLengths
from shared.engine.scheduler.pacing import (
    AIM,
    AIM_STEP,
    BORROWED,
    CLIENT_S,
    FIRST_LENGTH,
    GAP_TARGETS,
    LATE_SHARE,
    LEAST_AIM,
    LEAST_CHUNK,
    LEAST_SHARE,
    LENGTH_QUANTILE,
    MEAN_STEPS,
    MOST_AIM,
    SPENT_SHARE,
    Pacing,
    StepRoom,
)  # fmt: skip
from shared.engine.scheduler.scheduler import SchedulerConfig
from shared.engine.sequence import EngineSequence, Goal
from shared.sizing.step_fit import StepTimeFit
from shared.sizing.step_time import StepTimes, StepWork
from tests.examples import examples
from tests.unit.engine.builders import sequence
from tests.unit.engine.scheduler.timed_engine import TimedEngine, prompt

TIMES = StepTimes(2e-3, 4e-3, 0.25e-3, 0.1e-3, 1e-6, 1e-7, overlap=0.9)
BUDGET = 512


def engine_of(target_s: float, gap_s: float = 0.0) -> TimedEngine:
    return TimedEngine(SchedulerConfig(64, BUDGET, tpot_target_s=target_s, itl_target_s=gap_s), TIMES)


def answer(num_tokens, num_more, num_unpaced, began_s, in_flight, goal) -> EngineSequence:
    item = sequence("c", [2, 3], max_tokens=num_tokens + num_more, goal=goal)
    item.token_ids += [5] * num_tokens
    item.paced_from_s, item.num_unpaced_tokens = began_s, min(num_unpaced, num_tokens)
    item.num_in_flight_samples = in_flight
    return item


@given(
    st.integers(0, 10_000), st.floats(0.008, 0.1), st.sampled_from([0.0, 0.02, 0.05]), st.integers(1, 12),
    st.integers(1, 6),
)  # fmt: skip
@example(0, 0.008, 0.0, 1, 2)  # a step of answers alone comes to take longer than the target
@examples(40)
def test_no_answer_starves_chunks_always_progress_and_no_step_is_longer_than_the_greatest_gap(
    seed, target_s, gap_s, num_answers, num_prompts
):
    rng, engine = Random(seed), engine_of(target_s, gap_s)
    for index in range(num_answers):
        engine.scheduler.add(sequence(f"a{index}", prompt(rng.randint(4, 200), rng), max_tokens=rng.randint(5, 120)))
    for _ in range(rng.randint(1, 30)):
        engine.step()
    for index in range(num_prompts):
        engine.scheduler.add(sequence(f"p{index}", prompt(rng.randint(50, 3000), rng), max_tokens=3))
    greatest = max(target_s, gap_s) if gap_s else GAP_TARGETS * target_s
    answers = {f"a{index}" for index in range(num_answers)}
    for plan in engine.until_idle():
        work, before = engine.ran[-1].work, engine.ran[-1].slack_s
        planned = {item.sequence_id for item in plan.sequences}
        running = {s.sequence_id for s in engine.scheduler.sequences.running if s.num_output_tokens > 1}
        assert running & answers <= planned, "every running answer has a token in every step"
        if before is None or not work.num_chunks:
            continue
        decoding = StepWork(work.num_sequences, work.num_context_tokens)
        least = engine.times.step_s(decoding.with_chunk(LEAST_CHUNK, 3000))
        if not gap_s:  # three steps without chunks, where these take longer than the target
            least = max(least, GAP_TARGETS * engine.times.step_s(decoding))
        as_sequences = num_prompts * engine.times.sequence_s  # what chunks of one token are measured as
        assert engine.ran[-1].seconds <= max(greatest, least) * (1 + 1e-9) + as_sequences
        assert work.num_chunk_tokens >= min(LEAST_CHUNK, 2)
        if work.num_chunk_tokens > LEAST_CHUNK and before > 0:
            assert engine.ran[-1].seconds <= target_s + before, "no answer is late by a chunk beyond the least one"


def test_an_answer_meets_its_target_in_the_mean_beside_a_stream_of_long_prompts():
    """The target is twice a decode step: the rest of the time is the prompts'."""
    rng, engine = Random(1), engine_of(target_s=0.020)
    engine.scheduler.add(sequence("a", prompt(100, rng), max_tokens=400))
    engine.step()
    begin_s, count = engine.now_s, 0
    for index in range(1000):
        if not engine.scheduler.sequences.num_waiting:
            engine.scheduler.add(sequence(f"p{index}", prompt(2000, rng), max_tokens=1))
        plan = engine.step()
        count += any(item.sequence_id == "a" for item in plan.sequences)
        if engine.scheduler.sequences.get("a") is None:
            break
    mean_s = (engine.now_s - begin_s) / count
    assert 0.9 * 0.020 < mean_s <= 0.020 * (1 + 1e-9), "the time that the target leaves is used"
    assert max(ran.seconds for ran in engine.ran[1:]) <= GAP_TARGETS * 0.020


def test_slack_that_was_earned_makes_the_next_chunk_larger():
    rng = Random(2)
    chunks = []
    for num_steps in (1, 40):
        engine = engine_of(target_s=0.020, gap_s=0.2)
        engine.scheduler.add(sequence("a", prompt(100, rng), max_tokens=400))
        for _ in range(num_steps + 1):
            engine.step()
        engine.scheduler.add(sequence("p", prompt(4000, rng), max_tokens=1))
        engine.step()
        chunks.append(engine.ran[-1].work.num_chunk_tokens)
    assert LEAST_CHUNK < chunks[0] < chunks[1] <= BUDGET


def test_without_answers_or_without_a_target_a_chunk_has_the_whole_budget():
    rng = Random(3)
    for target_s, has_answer in ((0.010, False), (0.0, True)):
        engine = engine_of(target_s)
        if has_answer:
            engine.scheduler.add(sequence("a", prompt(10, rng), max_tokens=50))
            engine.step()
        engine.scheduler.add(sequence("p", prompt(2000, rng), max_tokens=1))
        assert engine.step().num_tokens == BUDGET


def test_an_answer_that_waited_without_blocks_is_in_time_again_when_it_continues():
    pacing, item = Pacing(0.010, fit=StepTimeFit(TIMES)), sequence("a", [2, 3], max_tokens=9)
    item.token_ids += [4, 5]
    pacing.began(item, 100.0)
    slow, decoding = StepWork(1, 100_000), StepWork(1, 64)  # in steps that slow an answer earns nothing
    assert pacing.least_slack_s([item], slow, 100.0) == 0.0
    item.token_ids += [6, 6, 6]
    assert pacing.least_slack_s([item], slow, 100.004) == pytest.approx(3 * AIM * 0.010 - 0.004)
    owed_s = BORROWED * 3 * (AIM * 0.010 - TIMES.step_s(decoding))  # four of its nine are left, and one is the next
    assert pacing.least_slack_s([item], decoding, 100.004) == pytest.approx(3 * AIM * 0.010 - 0.004 + owed_s)
    assert Pacing(0.0).least_slack_s([item], decoding, 100.004) is None
    assert pacing.least_slack_s([], StepWork(), 1.0) is None


def test_an_answer_that_owes_slows_chunks_to_half_of_the_target_and_no_further():
    pacing, item = Pacing(0.010), sequence("a", [2, 3], max_tokens=1)  # its next token is its last
    pacing.began(item, 100.0)
    limits = [pacing.step_limit_s([item], at_s, 0.001) for at_s in (99.98, 99.998, 100.0, 100.002, 100.006)]
    assert limits == pytest.approx([0.0195, 0.0105, 0.0095, 0.0075, 0.005])
    assert pacing.step_limit_s([item], 90.0) == pytest.approx(GAP_TARGETS * 0.010)
    assert pacing.step_limit_s([], 0.0) == float("inf")


def test_what_an_answer_will_earn_lets_a_new_one_bear_a_larger_chunk():
    pacing, item = Pacing(0.010), sequence("a", [2, 3], max_tokens=1000)
    pacing.began(item, 100.0)
    without, within = (pacing.step_limit_s([item], 100.0, decode_s) for decode_s in (0.010, 0.009))
    assert without == pytest.approx(AIM * 0.010)
    assert within == pytest.approx(AIM * 0.010 + BORROWED * (FIRST_LENGTH - 1) * (AIM * 0.010 - 0.009) / 2)
    for _ in range(40):
        pacing.ended(ended(400), 0.0)
    assert pacing.step_limit_s([item], 100.0, 0.009) == pytest.approx(GAP_TARGETS * 0.010), "answers are long here"


def test_answers_owe_nothing_where_steps_have_long_taken_all_that_is_due():
    pacing, item = Pacing(0.010), sequence("a", [2, 3], max_tokens=1000)
    pacing.began(item, 100.0)
    for _ in range(400):
        pacing.measured(StepWork(4, 400, 100, 5000, 1), 0.010)
    assert pacing.step_limit_s([item], 100.0, 0.004) == pytest.approx(AIM * 0.010)
    for _ in range(400):
        pacing.measured(StepWork(4, 400), 0.004)
    assert pacing.step_limit_s([item], 100.0, 0.004) > 2 * AIM * 0.010


@pytest.mark.parametrize("step_s", [0.004, 0.011])
def test_less_is_aimed_at_while_answers_are_late_unless_no_chunk_is_the_reason(step_s):
    fit = StepTimeFit(StepTimes(step_s, 0.0, 0.0, 0.0, 0.0, 0.0))
    pacing = Pacing(0.010, fit=fit)
    pacing.measured(StepWork(1, 100), step_s)
    for _ in range(200):
        late = ended(11)
        pacing.began(late, 0.0)
        late.num_unpaced_tokens = 1
        pacing.ended(late, 10 * 0.0101)
    assert pacing.aim == (LEAST_AIM if step_s < 0.010 else AIM)
    for number in range(2000):
        item = ended(11)
        pacing.began(item, 0.0)
        item.num_unpaced_tokens = 1
        pacing.ended(item, 10 * (0.0101 if number % 20 == 0 else 0.009))
    assert pacing.aim > 0.9, f"a share of {LATE_SHARE} may be late"


def test_more_is_aimed_at_once_answers_are_in_time_less_where_they_are_short_and_until_some_are_late():
    def after(num_answers: int, num_tokens: int, one_late_of: int = 0) -> float:
        pacing = Pacing(0.010)
        for number in range(1, num_answers + 1):
            item = ended(num_tokens)
            pacing.began(item, 0.0)
            item.num_unpaced_tokens = 1
            is_late = one_late_of > 0 and number % one_late_of == 0
            pacing.ended(item, (num_tokens - 1) * (0.0101 if is_late else 0.0099))
        return pacing.aim

    assert AIM < after(20, 200) < after(100, 200) < MOST_AIM
    assert after(1000, 200) == MOST_AIM
    assert after(1000, 20) == pytest.approx(1 - CLIENT_S / (20 * 0.010)), "a client's 5 ms are 2.5 % of 200 ms"
    assert after(1000, 5) == AIM
    assert after(999, 200, one_late_of=1000) == MOST_AIM
    assert after(3050, 200, one_late_of=200) > AIM, "rarer than RARELY_LATE"
    assert after(1000, 200, one_late_of=15) < AIM + AIM_STEP * LATE_SHARE, "as it was without MOST_AIM"


def test_an_answer_that_misses_its_target_whatever_comes_stops_no_prompt():
    pacing, item = Pacing(0.010), sequence("a", [2, 3], max_tokens=41)
    for _ in range(40):
        pacing.ended(ended(41), 0.0)
    pacing.began(item, 0.0)
    item.token_ids += [5] * 31
    can_earn_s = 10 * (0.010 - 0.006)  # in the ten tokens that are left, by steps without chunks
    limits = [
        pacing.step_limit_s([item], 31 * 0.010 + share * can_earn_s, decode_s)
        for share, decode_s in ((0.99, 0.006), (1.01, 0.006), (0.01, 0.020), (-0.01, 0.020))
    ]
    assert limits == pytest.approx([0.005, GAP_TARGETS * 0.010, GAP_TARGETS * 0.020, 0.005])
    pacing.set_target(0.010, 0.025)
    assert pacing.step_limit_s([item], 10.0, 0.020) == 0.025, "a gap that is set holds"


ANSWERS = st.builds(
    answer,
    num_tokens=st.integers(0, 60), num_more=st.integers(1, 60), num_unpaced=st.integers(0, 5),
    began_s=st.none() | st.floats(-1.0, 1.0), in_flight=st.integers(0, 1), goal=st.sampled_from(Goal),
)  # fmt: skip


@given(
    st.lists(ANSWERS, max_size=12), st.lists(st.integers(1, 80), max_size=20),
    st.lists(st.floats(1e-3, 0.02), max_size=3), st.floats(1e-3, 0.02), st.floats(-0.2, 2.0),
)  # fmt: skip
def test_the_least_slack_is_the_least_of_what_each_answer_has_and_may_owe(answers, lengths, steps_s, decode_s, at_s):
    """Beside the formula of each answer by itself, whatever order the others are looked at in."""
    pacing = Pacing(0.010, fit=StepTimeFit(StepTimes(decode_s, 0.0, 0.0, 0.0, 0.0, 0.0)))
    for length in lengths:
        pacing.ended(ended(length), 0.0)
    for step_s in steps_s:
        pacing.measured(StepWork(1, 10), step_s)
    due_s = pacing.aim * 0.010
    expected = OutputLengths(LENGTH_QUANTILE, FIRST_LENGTH)
    for length in lengths:
        expected.observe(length)
    mean_s = steps_s[0] if steps_s else decode_s
    for step_s in steps_s[1:]:
        mean_s += (step_s - mean_s) / MEAN_STEPS

    def slack_s(item: EngineSequence, in_flight: int) -> float:
        num_paced = item.num_output_tokens + in_flight - item.num_unpaced_tokens
        return item.paced_from_s + num_paced * due_s - at_s

    def num_left(item: EngineSequence, in_flight: int) -> int:
        num_tokens = item.num_output_tokens + in_flight
        most = item.max_tokens_total - item.num_prompt_tokens
        return max(0, min(expected.expected(num_tokens), most) - num_tokens - 1)

    def with_owed_s(item: EngineSequence, in_flight: int) -> float:
        return slack_s(item, in_flight) + BORROWED * num_left(item, in_flight) * max(0.0, due_s - mean_s)

    def misses(item: EngineSequence) -> bool:
        in_flight = item.num_in_flight_samples
        num_paced = item.num_output_tokens + in_flight - item.num_unpaced_tokens
        behind_s = -slack_s(item, in_flight) - num_paced * (0.010 - due_s)
        return slack_s(item, in_flight) <= 0 and behind_s > (num_left(item, in_flight) + 1) * max(0.0, 0.010 - decode_s)

    paced = [item for item in answers if item.goal is Goal.COMPLETION and item.paced_from_s is not None]
    least = min((with_owed_s(item, 0) for item in paced), default=None)
    assert pacing.least_slack_s(answers, StepWork(1, 0), at_s) == least
    borne = [with_owed_s(item, item.num_in_flight_samples) for item in paced if not misses(item)]
    least = min(borne, default=math.inf)
    spent = SPENT_SHARE * least if least > 0 else least
    limit = min(GAP_TARGETS * max(0.010, decode_s), max(LEAST_SHARE * 0.010, due_s + spent)) if paced else math.inf
    assert pacing.step_limit_s(answers, at_s, decode_s) == limit


def ended(num_tokens: int) -> EngineSequence:
    found = sequence("b", [2, 3], max_tokens=1000)
    found.token_ids += [5] * num_tokens
    return found


def test_a_steps_first_prompt_has_some_tokens_whatever_time_is_left_and_the_second_one_has_none():
    room = StepRoom(TIMES, 0.0, StepWork(8, 4096))
    assert not room.is_full
    assert room.most(0, 500) == LEAST_CHUNK
    assert room.most(0, 3) == 3
    room.take(0, LEAST_CHUNK)
    assert room.is_full
    assert room.most(0, 500) == 0
    assert StepRoom(None, 0.0, StepWork(8, 4096)).most(0, 500) == 500


def test_a_target_that_comes_later_bounds_chunks_and_the_batch_and_0_ends_that():
    rng, engine = Random(4), engine_of(0.0)
    engine.scheduler.add(sequence("a", prompt(10, rng), max_tokens=90))
    engine.step()
    engine.scheduler.add(sequence("p", prompt(4000, rng), max_tokens=1))
    chunks = []
    for target_s in (0.0, 0.020, 0.0):
        engine.scheduler.set_tpot_target(target_s)
        engine.step()
        chunks.append(engine.ran[-1].work.num_chunk_tokens)
    assert chunks[0] == chunks[2] == BUDGET - 1
    assert LEAST_CHUNK <= chunks[1] < 100
