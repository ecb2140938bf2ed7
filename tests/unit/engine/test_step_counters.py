"""What counts as the longest step, by which an engine is judged to hang."""

from __future__ import annotations

import pytest

from shared.engine.step_counters import GROWTH, SHORT_S, STEP_KINDS, StepCounters


def counters(*durations_s: float) -> StepCounters:
    steps = StepCounters()
    for duration_s in durations_s:
        steps.add(10, 1, duration_s)
    return steps


def test_the_longest_recent_step_decays() -> None:
    assert counters(0.1, 0.5, 0.2).longest_s == pytest.approx(0.99 * 0.5)
    assert counters(0.1, *[0.01] * 1000).longest_s == 0.01


def test_one_standstill_does_not_make_the_next_one_look_usual() -> None:
    assert counters(0.1, 0.1, 20.0).longest_s == SHORT_S
    assert counters(20.0).longest_s == SHORT_S  # a first step may compile
    assert counters(0.9, 20.0).longest_s == pytest.approx(GROWTH * 0.9)


def test_steps_that_are_long_again_and_again_count_in_full() -> None:
    assert counters(0.1, 3.0, 3.0).longest_s == 3.0


def test_a_chunk_that_is_larger_than_recent_ones_may_take_longer() -> None:
    """On a slow machine a long prompt comes behind minutes of short steps."""
    steps = StepCounters()
    for _ in range(400):
        steps.add(2, 2, 0.2)
    steps.begins(512)
    assert steps.expected_s == pytest.approx(0.2 * 512 / 2), "nothing is known but that more at once is no slower"
    steps.begins(512, predicted_s=17.0)
    steps.begins()
    assert steps.expected_s == 17.0, "that one is still under way"
    steps.begins()
    assert steps.expected_s == steps.longest_s == pytest.approx(0.2)
    steps.begins(512, predicted_s=0.01)
    assert steps.expected_s == steps.longest_s


def test_a_standstill_counts_in_full_among_what_the_engine_was_busy_with() -> None:
    assert counters(0.1, 20.0).busy_s == pytest.approx(20.1)


def test_steps_are_counted_by_kind_and_gaps_once_for_each_answer() -> None:
    steps = StepCounters()
    steps.add(8, 8, 0.004)
    steps.add(100, 1, 0.1, num_prefill_tokens=100)
    steps.add(103, 4, 0.2, num_prefill_tokens=100)
    steps.add(0, 0, 0.001)
    assert {kind: counts.cumulative()[-1] for kind, counts in steps.durations_s.items()} == dict.fromkeys(STEP_KINDS, 1)
    assert steps.durations_s["mixed"].total == 0.2
    assert (steps.gaps_s.cumulative()[-1], steps.gaps_s.total) == (8 + 3, 8 * 0.004 + 3 * 0.2)
    assert (steps.num_prefill_tokens, steps.num_computed_tokens) == (200, 211)


def test_tokens_of_one_answer_share_the_time_of_their_step() -> None:
    steps = StepCounters()
    steps.add(2 + 7, 6, 0.1, num_guesses=7, bursts=[5])  # one answer without guesses, one with 7, of which 4 were right
    assert (steps.gaps_s.cumulative()[-1], steps.gaps_s.total) == (6, pytest.approx(0.1 + 0.1))
