"""The shortest remaining prompt runs first, and none starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.plan import SampledToken, StepResult
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.scheduler.sequence_table import PromptOrder
from shared.engine.sequence import Goal
from shared.kv.pool import BlockPool
from tests.unit.engine.builders import sequence

BLOCK = 4
PATIENCE_S = 10.0


def arrivals(specs):
    """Sequences by (seconds after the one before, prompt tokens)."""
    items, now = [], 0.0
    for arrival, (gap_s, num_tokens) in enumerate(specs):
        now += gap_s
        item = sequence(f"s{arrival}", [2] * num_tokens, goal=Goal.FIRST_TOKEN)
        item.arrival, item.arrived_s = arrival, now
        items.append(item)
    return items, now


SPECS = st.lists(st.tuples(st.floats(0, 8), st.integers(1, 60)), min_size=1, max_size=30)


@given(SPECS, st.floats(0, 20))
def test_only_shorter_prompts_overtake_and_only_those_that_have_not_waited_their_time(specs, later):
    items, now = arrivals(specs)
    now += later
    order = PromptOrder(PATIENCE_S).sort([], items, now)
    for place, item in enumerate(order):
        for ahead in order[:place]:
            if ahead.arrival > item.arrival:
                assert now - item.arrived_s < PATIENCE_S
                assert ahead.num_tokens < item.num_tokens


def test_zero_keeps_the_order_of_arrival():
    items, now = arrivals([(0, 9), (0, 3), (0, 5)])
    assert PromptOrder(0).sort(items[:1], items[1:], now) == items


def test_what_is_left_counts_and_preempted_sequences_go_first():
    items, now = arrivals([(0, 50), (0, 9), (0, 40)])
    items[0].num_computed_tokens = 48
    assert [s.arrival for s in PromptOrder(PATIENCE_S).sort(items[:1], items[1:], now)] == [0, 1, 2]
    items[2].started = True
    assert [s.arrival for s in PromptOrder(PATIENCE_S).sort(items[:1], items[1:], now)] == [2, 0, 1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=40), st.integers(0, 30))
def test_nobody_starves_under_a_stream_of_short_prompts(specs, long_at):
    """From the time that a prompt may be overtaken no longer, only what came before it is computed before it."""
    now = 0.0
    s = Scheduler(BlockPool(400, BLOCK), SchedulerConfig(16, 12, max_overtaken_s=PATIENCE_S), lambda: now)
    specs = [*specs[:long_at], (0, 200), *specs[long_at:]]
    came, done = [], {}
    while len(done) < len(specs):
        while len(came) < len(specs) and (len(came) == 0 or specs[len(came)][0] == 0 or not s.has_work):
            item = sequence(f"s{len(came)}", [5 + len(came)] * specs[len(came)][1], goal=Goal.FIRST_TOKEN)
            s.add(item)
            came.append(item)
        if len(came) < len(specs):
            specs[len(came)] = (specs[len(came)][0] - 1, specs[len(came)][1])
        plan = s.schedule()
        assert plan.sequences, "work is left and nothing is planned"
        overdue = [i for i in came if i.sequence_id not in done and now - i.arrived_s >= PATIENCE_S]
        if overdue:
            assert overdue[0].sequence_id in [item.sequence_id for item in plan.sequences]
        now += 1.0
        count = sum(len(item.samples) for item in plan.sequences)
        for token in s.apply(plan, StepResult((SampledToken(9),) * count)).tokens:
            done[token.sequence_id] = now
    assert s.pool.num_used == 0


def test_a_short_prompt_goes_between_the_chunks_of_a_long_one():
    s = Scheduler(BlockPool(40, BLOCK), SchedulerConfig(8, 8, max_overtaken_s=PATIENCE_S), lambda: 0.0)
    s.add(sequence("long", [2] * 40, goal=Goal.FIRST_TOKEN))
    s.apply(s.schedule(), StepResult(()))
    s.add(sequence("short", [3] * 5, goal=Goal.FIRST_TOKEN))
    assert [(i.sequence_id, i.end) for i in s.schedule().sequences] == [("short", 5), ("long", 11)]
