"""A view is never better than what was committed to the worker, and forgets what ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.ledger import SETTLE_S, Ledger
from tests.unit.router.placement.builders import view


def state(ledger: Ledger) -> tuple[int, int, int]:
    one = ledger.view
    return one.num_free_blocks, one.num_requests, one.num_queued_tokens


def report(ledger, now_s, free=100, requests=0, queued=0) -> None:
    ledger.report(num_free_blocks=free, num_requests=requests, num_queued_tokens=queued, now_s=now_s)


def test_a_commitment_counts_at_once_and_until_the_reports_contain_it():
    ledger = Ledger(view())
    ledger.commit("a", num_tokens=50, num_blocks=4)
    assert state(ledger) == (96, 1, 50)
    report(ledger, 1.0)  # made before the worker could know
    assert state(ledger) == (96, 1, 50)
    ledger.sent("a", 1.0)
    report(ledger, 1.001)
    assert state(ledger) == (96, 1, 50)
    report(ledger, 1.001 + SETTLE_S, free=96, requests=1, queued=50)
    assert state(ledger) == (96, 1, 50)
    ledger.release("a")
    report(ledger, 2.0)
    assert state(ledger) == (100, 0, 0)


def test_an_acknowledged_commitment_is_in_the_next_report():
    ledger = Ledger(view())
    ledger.commit("a", num_tokens=0, num_blocks=4)
    ledger.sent("a", 1.0)
    ledger.acknowledged("a")
    report(ledger, 1.001, free=95, requests=1)
    assert state(ledger) == (95, 1, 0)


def test_a_first_token_takes_its_prompt_off_the_queue():
    ledger = Ledger(view())
    ledger.commit("a", num_tokens=50, num_blocks=4)
    ledger.computed("a")
    assert state(ledger) == (96, 1, 0)


def test_other_routers_work_is_in_the_reports():
    ledger = Ledger(view())
    report(ledger, 1.0, free=40, requests=5, queued=300)
    ledger.commit("a", num_tokens=50, num_blocks=4)
    assert state(ledger) == (36, 6, 350)


@given(
    st.lists(st.tuples(st.sampled_from(["commit", "sent", "ack", "computed", "release", "report"]), st.integers(0, 5)))
)
def test_after_all_is_released_only_the_reports_count(steps):
    ledger = Ledger(view())
    known = set()
    for now, (what, which) in enumerate(steps):
        name = str(which)
        if what == "commit" and name not in known:
            ledger.commit(name, num_tokens=10, num_blocks=1)
            known.add(name)
        elif what == "sent":
            ledger.sent(name, now)
        elif what == "ack":
            ledger.acknowledged(name)
        elif what == "computed":
            ledger.computed(name)
        elif what == "release":
            ledger.release(name)
            known.discard(name)
        elif what == "report":
            report(ledger, now)
        assert ledger.num_open == len(known) <= ledger.view.num_requests
        assert 0 <= 100 - ledger.view.num_free_blocks <= len(known)
    for name in known:
        ledger.release(name)
    assert state(ledger) == (100, 0, 0)
