"""A hand-off is stalled where what was sent does not arrive; never while its sender computes or anything arrives."""

from __future__ import annotations

from shared.kv.handoff.stall import REPORT_EVERY_S, STALLED_S, StallWatch


def reports(*states: tuple[int, int, int], every_s: float = REPORT_EVERY_S) -> list[bool]:
    """What a watch says of (arrived, sent, taken) in turn."""
    watch = StallWatch()
    return [watch.is_stalled(*state, now_s=100.0 + every_s * place) for place, state in enumerate(states)]


def test_what_was_sent_and_stays_away_is_a_stall_once_and_within_five_seconds_of_the_last_arrival():
    said = reports(*[(3, 8, 3)] * 7)
    assert said == [False] * 6 + [True]
    before_the_first_report_s = 2 * REPORT_EVERY_S
    assert before_the_first_report_s + STALLED_S + REPORT_EVERY_S <= 4.5


def test_a_sender_that_computes_for_a_minute_stalls_nothing():
    assert not any(reports(*[(3, 3, 3)] * 120))
    assert not any(reports(*[(0, 0, 0)] * 120))


def test_what_is_sent_at_the_end_of_a_long_computation_gets_its_own_time():
    said = reports(*[(3, 3, 3)] * 60, *[(3, 8, 3)] * 8)
    assert said.index(True) == 60 + 6


def test_a_slow_network_that_brings_a_block_in_time_is_not_cut():
    slow = [(arrived, 8, arrived) for arrived in range(8) for _ in range(5)]
    assert not any(reports(*slow))


def test_another_hand_offs_blocks_on_the_same_connection_are_progress():
    assert not any(reports(*[(0, 8, place // 4) for place in range(60)]))


def test_reports_that_were_held_up_and_come_at_once_prove_nothing():
    assert not any(reports(*[(3, 8, 3)] * 60, every_s=0.0))


def test_few_reports_prove_nothing_however_late_they_are():
    """A receiver that was held up has not read what had arrived."""
    assert reports(*[(3, 8, 3)] * 4, every_s=10.0) == [False, False, False, True]
