"""A pace is what the workers' own scheduler would do: the largest chunk whose step the answers bear."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.beside import pace_of
from services.router.placement.paces import busy_step_s, joins_in_s, tpot_s, ttft_s
from services.router.placement.views import Work
from shared.engine.scheduler.pacing import AIM, GAP_TARGETS, LEAST_CHUNK
from shared.sizing.step_time import StepTimes, StepWork
from tests.unit.router.placement.builders import view

TIMES = StepTimes(1e-3, 6e-3, 2e-5, 1e-6, 1e-8, 1e-9, overlap=0.7)
times = st.builds(
    StepTimes,
    fixed_s=st.floats(0, 1e-2),
    read_s=st.floats(0, 1e-2),
    token_s=st.floats(1e-6, 1e-3),
    sequence_s=st.floats(0, 1e-4),
    kv_s=st.floats(0, 1e-7),
    attention_s=st.floats(0, 1e-8),
    overlap=st.floats(0, 1),
)


@given(times, st.integers(1, 64), st.integers(1, 2000), st.floats(1e-3, 0.2))
def test_beside_answers_a_chunk_is_the_largest_whose_step_takes_the_target(times, batch, context, target_s):
    pace = pace_of(times, batch, batch * context, 0.0, target_s, 8192)
    step = lambda chunk: times.step_s(StepWork(batch, batch * context, chunk))  # noqa: E731
    assert LEAST_CHUNK <= pace.chunk_tokens <= 8192 - batch
    assert pace.decode_s == pytest.approx(step(0))
    if pace.chunk_tokens > LEAST_CHUNK:
        limit_s = AIM * target_s if step(0) <= target_s else GAP_TARGETS * step(0)
        assert step(int(pace.chunk_tokens)) <= limit_s * (1 + 1e-9)
    if pace.chunk_tokens < 8192 - batch:
        assert step(int(pace.chunk_tokens) + 1) >= AIM * target_s * (1 - 1e-9)


def test_without_answers_or_a_target_a_chunk_is_a_whole_step():
    assert pace_of(TIMES, 0, 0, 0.0, 0.01, 2048).chunk_tokens == 2048
    assert pace_of(TIMES, 8, 800, 0.0, math.inf, 2048).chunk_tokens == 2040


def test_a_prompt_waits_for_the_queue_before_it():
    alone = ttft_s(view(max_step_tokens=512), TIMES, Work.of(512, 0), math.inf, 0.0)
    assert alone == pytest.approx(TIMES.prompt_s(512), rel=0.01)
    behind = view(max_step_tokens=512, num_queued_tokens=1024, num_queued_pairs=1024 * 512.0)
    assert ttft_s(behind, TIMES, Work.of(512, 0), math.inf, 0.0) == pytest.approx(3 * alone, rel=0.1)


def test_the_part_of_the_next_step_that_has_passed_since_the_report_is_done():
    behind = view(max_step_tokens=512, num_queued_tokens=1024, num_queued_pairs=1024 * 512.0, reported_s=5.0)
    fresh, later, much_later = (ttft_s(behind, TIMES, Work.of(512, 0), math.inf, now_s) for now_s in (5, 5.005, 9))
    assert later == pytest.approx(fresh - 0.005)
    assert much_later == pytest.approx(fresh * 2 / 3, rel=0.01), "no more than a step: the next report would tell"
    idle = view(max_step_tokens=512, reported_s=5.0)
    assert ttft_s(idle, TIMES, Work.of(512, 0), math.inf, 9) == ttft_s(idle, TIMES, Work.of(512, 0), math.inf, 5)


def test_answers_that_run_there_lengthen_it():
    busy = view(num_decoding=32, num_context_tokens=32 * 500)
    prompt = Work.of(2000, 0)
    assert ttft_s(busy, TIMES, prompt, 0.01, 0.0) > 1.3 * ttft_s(view(), TIMES, prompt, 0.01, 0.0)


def test_slack_that_answers_have_earned_is_spent_first():
    busy = {"num_decoding": 32, "num_context_tokens": 32 * 500, "max_step_tokens": 2048}
    prompt = Work.of(1000, 0)
    none, some, plenty = (
        ttft_s(view(least_slack_s=slack_s, **busy), TIMES, prompt, 0.01, 0.0) for slack_s in (0.0, 0.005, 1.0)
    )
    assert none > some > plenty
    in_one_step = TIMES.step_s(StepWork(32, 32 * 500).with_chunk(1000, 0))
    assert in_one_step < GAP_TARGETS * 0.01
    assert plenty == pytest.approx(in_one_step, rel=0.05)


def test_a_step_is_predicted_with_the_answer_that_would_join():
    one = view(num_decoding=4, num_context_tokens=400)
    assert tpot_s(one, TIMES, 1, 100) == TIMES.decode_step_s(5, 500)
    assert tpot_s(view(), TIMES, 0, 0) == 0.0


def test_answers_that_do_not_run_yet_hinder_prompts_half_and_are_there_when_another_joins():
    running = {"num_decoding": 32, "num_context_tokens": 32 * 500}
    prompt = Work.of(4000, 0)
    alone, half, all_of_them = (
        ttft_s(one, TIMES, prompt, 0.012, 0.0)
        for one in (view(), view(**running, num_promised=32, num_promised_tokens=32 * 500), view(**running))
    )
    assert alone < half < all_of_them
    promised = view(**running, num_promised=8, num_promised_tokens=8 * 500)
    assert tpot_s(promised, TIMES, 1, 500) == TIMES.decode_step_s(33, 33 * 500)
    assert tpot_s(promised, TIMES, 1, 500, in_s=0.5, life_s=1.0) == TIMES.decode_step_s(21, 21 * 500)
    assert tpot_s(promised, TIMES, 1, 500, in_s=2.0, life_s=1.0) == TIMES.decode_step_s(5, 5 * 500)


@given(st.integers(0, 64), st.integers(0, 64), st.floats(0, 100), st.floats(1e-3, 100))
def test_a_batch_some_time_from_now_is_no_larger_than_all_that_is_known(running, promised, in_s, life_s):
    one = view(num_decoding=running + promised, num_context_tokens=100 * (running + promised))
    one.num_promised, one.num_promised_tokens = promised, 100 * promised
    assert tpot_s(one, TIMES, 1, 100, in_s, life_s) <= tpot_s(one, TIMES, 1, 100) * (1 + 1e-9)


@given(
    times,
    st.integers(0, 64),
    st.integers(0, 2000),
    st.floats(0, 1e4),
    st.floats(1e-3, 0.2) | st.just(math.inf),
    st.integers(1, 8192),
    st.floats(1, 1e5) | st.just(math.inf),
)
def test_a_pace_is_to_the_last_digit_what_its_definition_gives(
    times, batch, context, pairs, target_s, budget, num_tokens
):
    def step_s(chunk):
        own_s = times.fixed_s + batch * times.sequence_s + batch * context * times.kv_s
        products_s = (batch + chunk) * times.token_s
        return own_s + chunk * (pairs * times.attention_s) + times.hidden_s(times.read_s, products_s)

    chunk = min(num_tokens, max(1.0, budget - batch))
    if batch and target_s < math.inf:
        limit_s = AIM * target_s
        if step_s(0.0) > target_s:
            limit_s = GAP_TARGETS * step_s(0.0)
        own_s = times.fixed_s + batch * times.sequence_s + batch * context * times.kv_s
        largest = min(
            (limit_s - own_s - read_s - batch * token_s) / (token_s + pairs * times.attention_s)
            if token_s + pairs * times.attention_s > 0
            else math.inf
            if limit_s - own_s - read_s - batch * token_s >= 0
            else 0.0
            for read_s, token_s in times.lines
        )
        chunk = max(min(chunk, LEAST_CHUNK), min(chunk, largest))
    expected = (chunk, step_s(chunk), step_s(0.0) if batch else 0.0)
    assert pace_of(times, batch, batch * context, pairs, target_s, budget, num_tokens) == expected


@given(times, st.integers(0, 64), st.lists(st.integers(0, 200_000), min_size=2), st.floats(0, 5), st.floats(0.1, 20))
def test_the_more_prompts_are_queued_where_an_answer_comes_the_longer_its_steps_up_to_the_target(
    times, batch, queues, in_s, life_s
):
    target_s, own_s = 0.02, times.step_s(StepWork(batch + 1, 500 * (batch + 1)))
    views = [
        view(
            num_decoding=batch, num_context_tokens=500 * batch, num_queued_tokens=queued, num_queued_pairs=9.0 * queued
        )
        for queued in sorted(queues)
    ]
    steps = [busy_step_s(one, times, own_s, in_s, target_s, life_s) for one in views]
    assert steps == sorted(steps)
    assert all(own_s <= step_s <= max(own_s, AIM * target_s) * (1 + 1e-9) for step_s in steps)
    for one in views:
        waits_s = joins_in_s(one, times, in_s, target_s)
        assert waits_s >= 0
        assert not waits_s or (one.num_queued_tokens and not batch)
