"""A pair of workers that failed is avoided, then tried by one request; placement goes around it."""

from __future__ import annotations

from services.router.placement.cut_pairs import FIRST_AVOIDED_S, MAX_AVOIDED_S, TRIAL_S, CutPairs

CUT = {"d0": frozenset({"p0"})}


def failed(now_s: float = 0.0) -> CutPairs:
    pairs = CutPairs()
    pairs.note_cut("p0", "d0", now_s)
    return pairs


def test_a_pair_that_failed_is_avoided_for_a_while_and_the_others_are_not():
    pairs = failed()
    assert pairs.avoided(FIRST_AVOIDED_S - 0.1) == CUT
    assert pairs.avoided(FIRST_AVOIDED_S) == {}


def test_one_request_tries_the_pair_and_its_success_opens_it_for_all():
    pairs = failed()
    pairs.note_placed("p0", "d0", 20.0)
    assert pairs.avoided(20.0) == CUT
    pairs.note_works("p0", "d0")
    assert pairs.avoided(20.0) == {}


def test_each_failed_trial_doubles_the_time_up_to_a_limit():
    pairs, now_s, waited = failed(), FIRST_AVOIDED_S, []
    for _ in range(6):
        pairs.note_placed("p0", "d0", now_s)
        pairs.note_cut("p0", "d0", now_s + 4.0)
        begun = now_s = now_s + 4.0
        while pairs.avoided(now_s):
            now_s += 1.0
        waited.append(now_s - begun)
    assert waited == [30.0, 60.0, 120.0, 240.0, MAX_AVOIDED_S, MAX_AVOIDED_S]


def test_requests_that_fail_together_count_once():
    pairs = failed()
    for _ in range(20):
        pairs.note_cut("p0", "d0", 1.0)
    assert pairs.avoided(FIRST_AVOIDED_S) == {}


def test_a_trial_without_a_verdict_lets_the_next_request_try():
    pairs = failed()
    pairs.note_placed("p0", "d0", 20.0)
    assert pairs.avoided(20.0 + TRIAL_S - 0.1) == CUT
    assert pairs.avoided(20.0 + TRIAL_S) == {}
