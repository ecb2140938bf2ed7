"""Which requests are good, and what the others were lost to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.blocked import Cause
from services.router.dispatch.record import Failure, RequestState
from services.router.views.attribution.verdict import (
    Outcome,
    Targets,
    after_first_token,
    before_first_token,
    judge,
    outcome,
)
from services.router.views.attribution.window import summarize
from services.router.views.timings import delivered_at, ended_at, first_token_at, tpot_s, ttft_s, ttft_split
from tests.unit.router.views.attribution.requests import ended

DAMAGED = Failure("transfer_failed", "", 503)
LATE = Failure("deadline_exceeded", "", 504)
TARGETS = Targets(ttft_s=0.5, tpot_s=0.05)


def test_a_request_within_its_targets_is_good():
    verdict = judge(ended(), TARGETS)
    assert (verdict.counts, verdict.lost_to, verdict.missed) == (True, None, "")


def test_without_targets_nothing_is_late():
    assert judge(ended(ttft_ms=9e6), Targets()).lost_to is None


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"prefill_compute_ms": 900.0}, Cause.PREFILL_COMPUTE),
        ({"prefill_queue_ms": 900.0}, Cause.PREFILL_COMPUTE),
        ({"prefix_fetch_ms": 900.0}, Cause.TRANSFER),
        ({"adapter_ms": 900.0}, Cause.TRANSFER),
        ({"placement_ms": 900.0}, Cause.ROUTER),
        ({}, Cause.ROUTER),
        ({"reserve_ms": 900.0}, Cause.ROUTER),
        ({"reserve_ms": 900.0, "reserve_on_worker_ms": 880.0}, Cause.DECODE_STEP),
        ({"queue_ms": 900.0}, Cause.QUEUEING),
        ({"queue_ms": 900.0, "waits": {Cause.KV_ROOM: 0.8}}, Cause.KV_ROOM),
        ({"queue_ms": 900.0, "waits": {Cause.PREFILL_COMPUTE: 0.8}}, Cause.PREFILL_COMPUTE),
        ({"queue_ms": 900.0, "waits": {Cause.DECODE_STEP: 0.8}}, Cause.DECODE_STEP),
        ({"placement_ms": 900.0, "num_attempts": 2, "num_failures": 1}, Cause.FAILURE),
        ({"placement_ms": 900.0, "num_attempts": 2}, Cause.KV_ROOM),
    ],
)
def test_a_late_first_token_is_lost_to_what_took_most_of_its_time(fields, cause):
    verdict = judge(ended(**{"ttft_ms": 1000.0, "ended_s": 101.1, "delivered_at": 101.1, **fields}), TARGETS)
    assert (verdict.lost_to, verdict.missed) == (cause, "ttft")


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"ended_s": 101.1, "decode_ms": 990.0}, Cause.DECODE_STEP),
        ({"ended_s": 101.1, "decode_ms": 990.0, "preempted_ms": 800.0}, Cause.KV_ROOM),
        ({"ended_s": 101.1, "ship_exposed_ms": 900.0}, Cause.TRANSFER),
        ({"ended_s": 101.1}, Cause.ROUTER),
        ({"ended_s": 101.1, "num_attempts": 2, "num_failures": 1}, Cause.FAILURE),
        ({"delivered_at": 101.1}, Cause.CLIENT),
        ({"outcome": Outcome.CUT, "ended_s": 101.1, "decode_ms": 0.0}, Cause.DECODE_STEP),
    ],
)
def test_slow_tokens_are_lost_to_what_took_most_of_their_time(fields, cause):
    verdict = judge(ended(**{"delivered_at": fields.get("ended_s", 0.0), **fields}), TARGETS)
    assert (verdict.lost_to, verdict.missed) == (cause, "tpot")


def test_the_target_that_was_missed_by_more_decides():
    late = {"ttft_ms": 600.0, "prefill_compute_ms": 600.0, "delivered_at": 102.2, "ended_s": 102.2}
    assert judge(ended(**late, decode_ms=1600.0), TARGETS).missed == "tpot"
    assert judge(ended(**late, decode_ms=1600.0), Targets(0.1, 0.15)).missed == "ttft"


def test_the_clients_own_target_goes_before_the_routers():
    assert judge(ended(ttft_target_s=0.05), TARGETS).missed == "ttft"
    assert judge(ended(ttft_ms=800.0, ended_s=100.9, ttft_target_s=1.0), Targets(0.5)).lost_to is None


@pytest.mark.parametrize(
    ("outcome", "fields", "cause"),
    [
        (Outcome.REFUSED, {}, Cause.QUEUEING),
        (Outcome.REFUSED, {"waits": {Cause.KV_ROOM: 0.01}}, Cause.KV_ROOM),
        (Outcome.REFUSED, {"waits": {Cause.KV_ROOM: 0.01, Cause.PREFILL_COMPUTE: 0.1}}, Cause.PREFILL_COMPUTE),
        (Outcome.FAILED, {"error": Failure("worker_lost", "", 503), "state": RequestState.DECODING}, Cause.FAILURE),
        (
            Outcome.FAILED,
            {"error": DAMAGED, "state": RequestState.SHIPPING},
            Cause.TRANSFER,
        ),
        (Outcome.FAILED, {"error": LATE, "state": RequestState.PREFILLING}, Cause.PREFILL_COMPUTE),
        (Outcome.FAILED, {"error": LATE, "state": RequestState.DECODING}, Cause.DECODE_STEP),
    ],
)
def test_what_was_refused_or_failed_is_lost_too(outcome, fields, cause):
    verdict = judge(ended(outcome, ttft_ms=None, **fields), TARGETS)
    assert (verdict.counts, verdict.lost_to, verdict.missed) == (True, cause, outcome.value)


def test_a_client_that_leaves_early_says_nothing_and_one_that_waited_too_long_was_lost():
    left = {"ttft_ms": None, "num_output_tokens": 0, "state": RequestState.PREFILLING}
    assert not judge(ended(Outcome.CUT, **left), TARGETS).counts
    late = judge(ended(Outcome.CUT, **left, ended_s=101.0), TARGETS)
    assert (late.lost_to, late.missed) == (Cause.PREFILL_COMPUTE, "ttft")


SECONDS = st.floats(0.0, 20.0)
MILLISECONDS = st.floats(0.0, 20_000.0)
CASES = st.fixed_dictionaries(
    {
        "outcome": st.sampled_from(Outcome),
        "waits": st.dictionaries(st.sampled_from(Cause), SECONDS),
        "num_attempts": st.integers(1, 3),
        "num_failures": st.integers(0, 2),
        "num_output_tokens": st.integers(0, 50),
        "ended_s": SECONDS.map(lambda later: 100.0 + later),
        "delivered_at": SECONDS.map(lambda later: 100.0 + later),
        **dict.fromkeys(
            ["decode_ms", "preempted_ms", "reserve_on_worker_ms", "queue_ms", "placement_ms", "reserve_ms",
             "prefix_fetch_ms", "adapter_ms", "prefill_queue_ms", "prefill_compute_ms", "ship_exposed_ms"],
            MILLISECONDS,
        ),
    }
)  # fmt: skip
_IN_ROUTER = ("queue_ms", "placement_ms", "reserve_ms")
_ON_WORKER = ("prefix_fetch_ms", "adapter_ms", "prefill_queue_ms", "prefill_compute_ms")


@given(CASES, MILLISECONDS)
def test_every_moment_of_a_request_is_given_to_one_cause(case, return_ms):
    ttft_ms = sum(case[name] for name in (*_IN_ROUTER, *_ON_WORKER)) + return_ms
    request = ended(**case, ttft_ms=ttft_ms)
    split = ttft_split(request)
    before, after = before_first_token(request, split), after_first_token(request, split)
    assert math.isclose(sum(split.parts_ms.values()), ttft_ms, rel_tol=1e-6, abs_tol=1e-3)
    assert all(seconds > 0.0 for seconds in (*before.values(), *after.values()))
    assert math.isclose(sum(before.values()), ttft_s(request), abs_tol=1e-6)
    if tpot_s(request) is not None and ended_at(request) >= first_token_at(request):
        whole = delivered_at(request) - first_token_at(request)
        assert math.isclose(sum(after.values()), whole, abs_tol=1e-6)


@given(st.lists(CASES, max_size=12), st.floats(0.0, 5.0), st.floats(0.0, 1.0))
def test_good_and_lost_requests_add_up_and_each_lost_one_has_one_cause(cases, ttft_s, tpot_s):
    targets = Targets(ttft_s, tpot_s)
    judged = [(request, judge(request, targets)) for case in cases for request in (ended(**case),)]
    window = summarize(judged, targets, 60.0)
    assert window.num_requests == sum(verdict.counts for _, verdict in judged)
    assert sum(share.num_lost for share in window.causes) == window.num_lost == window.num_requests - window.num_good
    assert {share.cause for share in window.causes} == set(Cause)
    assert sum(share.time_share for share in window.causes) <= 1.0 + 1e-9
    assert (window.binding is None) == (window.num_lost == 0)
    for request, verdict in judged:
        late = verdict.missed in ("ttft", "tpot")
        assert (verdict.missed != "") == (verdict.lost_to is not None)
        assert not late or verdict.counts
        assert outcome(request) is not Outcome.REFUSED or verdict.missed == "refused"
