"""What running answers are expected to take."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.scheduler.block_admission import MIN_OBSERVATIONS, WINDOW, GrowthReserve, OutputLengths
from shared.engine.scheduler.block_tables import GroupedTables
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import EngineSequence, Goal
from shared.errors import Overloaded
from shared.kv.groups import KVGroups
from shared.kv.pool import BlockPool
from tests.unit.engine.builders import sequence

BLOCK = 4
QUANTILES = st.floats(0.01, 1)
GOALS = st.sampled_from(Goal)


@given(QUANTILES, st.lists(st.integers(1, 500), max_size=2 * WINDOW), st.integers(0, 600))
def test_an_answer_is_expected_to_become_the_quantile_of_the_newest_that_became_longer(quantile, lengths, produced):
    observed = OutputLengths(quantile, 100)
    for length in lengths:
        observed.observe(length)
    longer = sorted(length for length in lengths[-WINDOW:] if length > produced)
    found = observed.expected(produced)
    assert found > produced
    if min(len(lengths), WINDOW) >= MIN_OBSERVATIONS and longer:
        assert found == longer[max(0, math.ceil(quantile * len(longer)) - 1)]


@given(st.lists(st.integers(1, 50), min_size=MIN_OBSERVATIONS, max_size=60), st.integers(0, 50))
def test_a_higher_quantile_never_expects_less(lengths, produced):
    expected = []
    for quantile in (0.1, 0.5, 0.9, 1.0):
        observed = OutputLengths(quantile, 100)
        for length in lengths:
            observed.observe(length)
        expected.append(observed.expected(produced))
    assert expected == sorted(expected)


def test_before_enough_answers_ended_the_first_guess_stands():
    observed = OutputLengths(0.5, 100)
    for _ in range(MIN_OBSERVATIONS - 1):
        observed.observe(3)
    assert (observed.expected(0), observed.expected(100)) == (100, 101)
    observed.observe(3)
    assert (observed.expected(0), observed.expected(3)) == (3, 6)


@given(
    QUANTILES,
    st.lists(st.integers(1, 60), max_size=20),
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(1, 60), st.integers(0, 20), GOALS), max_size=8
    ),
)
def test_the_reserve_of_several_is_the_sum_of_what_each_is_expected_to_take(quantile, lengths, holders):
    reserve = GrowthReserve(KVGroups(BLOCK), quantile, 10)
    for length in lengths:
        reserve.ended(answered([2], length, 1, Goal.COMPLETION))
    items = []
    for prompt, produced, more, held, goal in holders:
        items.append(answered([2] * prompt, produced, more, goal))
        items[-1].block_ids = list(range(held))
    assert reserve.num_blocks(items) == sum(reserve.of_newcomer(item, len(item.block_ids)) for item in items)


def answered(prompt: list[int], produced: int, more: int, goal: Goal) -> EngineSequence:
    item = sequence("a", prompt, max_tokens=produced + more, goal=goal)
    item.token_ids += [5] * produced
    return item


@given(QUANTILES, st.integers(1, 40), st.integers(1, 40), st.integers(1, 400), st.integers(0, 20))
def test_the_reserve_never_exceeds_what_max_tokens_allows(quantile, guess, prompt, max_tokens, held):
    reserve = GrowthReserve(KVGroups(BLOCK), quantile, guess)
    item = sequence("a", [2] * prompt, max_tokens=max_tokens)
    most = max(0, -(-item.max_tokens_total // BLOCK) - held)
    assert 0 <= reserve.of_newcomer(item, held) <= most


def test_a_prompt_that_only_passes_through_reserves_its_own_blocks():
    reserve = GrowthReserve(KVGroups(BLOCK), 0.9, 1000)
    item = sequence("a", [2] * 10, goal=Goal.FIRST_TOKEN)
    assert reserve.of_newcomer(item, 1) == 2


def test_without_a_quantile_one_block_is_kept_for_each():
    reserve = GrowthReserve(KVGroups(BLOCK), 0.0, 1000)
    items = [sequence(name, [2] * 10) for name in "abc"]
    assert reserve.num_blocks(items) == 3
    assert reserve.of_newcomer(items[0], 0) == 0


def test_reserve_is_refused_where_running_answers_will_need_the_blocks():
    s = Scheduler(BlockPool(20, BLOCK), SchedulerConfig(8, 64, output_quantile=0.5, first_output_guess=24))
    s.reserve(sequence("a", [2] * 8, max_tokens=40))  # holds 3, is expected to hold 8
    assert s.num_growth_blocks == 5
    s.reserve(sequence("b", [3] * 8, max_tokens=40))
    with pytest.raises(Overloaded) as refused:
        s.reserve(sequence("c", [4] * 8, max_tokens=40))
    assert refused.value.details == {"retry_after_s": 1.0, "field": "num_kv_blocks", "limit": 4}
    assert s.pool.num_used == 6
    s.reserve(sequence("d", [4] * 8, max_tokens=4))
    s.check_integrity()


def test_short_answers_make_room_for_more():
    s = Scheduler(BlockPool(20, BLOCK), SchedulerConfig(8, 64, output_quantile=0.9, first_output_guess=24))
    for i in range(MIN_OBSERVATIONS):
        s.reserve(sequence(f"s{i}", [2] * 8, max_tokens=40))
        s.join(f"s{i}", 1, {}, None)  # its first token ends it
    for name in "abcdef":
        s.reserve(sequence(name, [ord(name)] * 8, max_tokens=40))
    assert s.pool.num_used == 18


def test_one_that_has_the_pool_to_itself_starts_however_long_it_may_become():
    s = Scheduler(BlockPool(4, BLOCK), SchedulerConfig(8, 64, output_quantile=1.0, first_output_guess=1000))
    s.reserve(sequence("a", [2] * 8, max_tokens=7))
    s.join("a", 5, {}, None)
    s.add(sequence("b", [3] * 8, max_tokens=7))
    assert [item.sequence_id for item in s.schedule().sequences] == ["a"]


def test_only_the_newest_answers_are_remembered():
    observed = OutputLengths(1.0, 10)
    observed.observe(1000)
    for _ in range(WINDOW - 1):
        observed.observe(5)
    assert observed.expected(0) == 1000
    observed.observe(7)  # the longest one is the oldest, too
    assert observed.expected(0) == 7
    for length in range(WINDOW, 0, -1):
        observed.observe(length)
    assert [observed.expected(n) for n in (0, 100, WINDOW - 1)] == [WINDOW] * 3
    assert observed.expected(WINDOW) == 2 * WINDOW
    assert len(observed._sorted) == WINDOW


def test_guesses_have_states_of_their_own_as_far_as_there_are_blocks():
    groups, pool = KVGroups(BLOCK, (None, 2, 2), 2), BlockPool(24, BLOCK)
    tables, item = GroupedTables(pool, groups, step_tokens=8), sequence("a", [2] * 6, max_tokens=20)
    assert tables.grow(item, 6)
    assert tables.grow_for_guesses(item, 3)
    assert len(set(item.guess_states)) == 3 * groups.num_states
    assert not set(item.guess_states) & set(item.block_ids)
    rest = pool.allocate(pool.num_free - 1)
    item.guess_states, held = [], item.guess_states
    assert not tables.grow_for_guesses(item, 1)
    item.guess_states = held
    tables.free(item)
    pool.release(rest)
    assert pool.num_used == 0
