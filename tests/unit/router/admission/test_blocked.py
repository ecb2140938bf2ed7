"""What the queue's head waits for, and for how long."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.blocked import BlockedClock, Cause, between, blocker
from services.router.placement.views import NO_HITS, PlacementRequest, WorkerView


def worker(**fields) -> WorkerView:
    known = {
        "name": "d0", "num_free_blocks": 100, "num_total_blocks": 100, "num_requests": 0, "max_num_seqs": 8,
        "num_queued_tokens": 0,
    }  # fmt: skip
    return WorkerView(**{**known, **fields})


REQUEST = PlacementRequest(64, 16, NO_HITS)


@pytest.mark.parametrize(
    ("workers", "cause"),
    [
        ([], Cause.QUEUEING),
        ([worker(accepting=False)], Cause.QUEUEING),
        ([worker()], Cause.PREFILL_COMPUTE),
        ([worker(num_free_blocks=1)], Cause.KV_ROOM),
        ([worker(num_requests=8)], Cause.DECODE_STEP),
        ([worker(num_requests=8), worker(name="d1", num_free_blocks=1)], Cause.KV_ROOM),
        ([worker(num_free_blocks=1), worker(name="d1")], Cause.PREFILL_COMPUTE),
    ],
)
def test_the_head_waits_for_what_no_decode_worker_has_or_else_for_a_prefill_worker(workers, cause):
    assert blocker(REQUEST, workers) is cause


def test_time_goes_to_the_reason_that_held_the_head_then():
    clock = BlockedClock()
    before = clock.read(0.0)
    clock.hold(Cause.KV_ROOM, 1.0)
    clock.hold(Cause.PREFILL_COMPUTE, 3.0)
    clock.release(3.5)
    clock.hold(Cause.KV_ROOM, 10.0)
    assert between(before, clock.read(11.0)) == {Cause.KV_ROOM: 3.0, Cause.PREFILL_COMPUTE: 0.5}
    assert clock.cause is Cause.KV_ROOM
    assert clock.is_due(11.0)
    clock.hold(Cause.KV_ROOM, 11.0)
    assert not clock.is_due(11.0)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.sampled_from([None, *Cause])), max_size=30))
def test_the_reasons_times_add_up_to_the_time_that_somebody_was_held(steps):
    clock, now, held = BlockedClock(), 0.0, 0.0
    for duration, cause in steps:
        if cause is None:
            clock.release(now)
        else:
            clock.hold(cause, now)
            held += duration
        now += duration
    assert math.isclose(sum(clock.read(now).values()), held, abs_tol=1e-9)
