"""A view is never better than what was committed to the worker, and forgets what ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.commitments import SETTLE_S, Ledger
from services.router.placement.views import NO_WORK, Work
from tests.unit.router.placement.builders import view


def state(ledger: Ledger) -> tuple[int, int, int]:
    one = ledger.view
    return one.num_free_blocks, one.num_requests, one.num_queued_tokens


def report(ledger, now_s, free=100, requests=0, queued=0) -> None:
    ledger.report(num_free_blocks=free, num_requests=requests, queued=Work(queued), now_s=now_s)


def test_a_commitment_counts_at_once_and_until_the_reports_contain_it():
    ledger = Ledger(view())
    ledger.commit("a", Work.of(50, 0), num_blocks=4)
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
    ledger.commit("a", NO_WORK, num_blocks=4)
    ledger.sent("a", 1.0)
    ledger.acknowledged("a")
    report(ledger, 1.001, free=95, requests=1)
    assert state(ledger) == (95, 1, 0)


def test_a_first_token_takes_its_prompt_off_the_queue():
    ledger = Ledger(view())
    ledger.commit("a", Work.of(50, 0), num_blocks=4)
    ledger.computed("a")
    assert state(ledger) == (96, 1, 0)


def test_other_routers_work_is_in_the_reports():
    ledger = Ledger(view())
    report(ledger, 1.0, free=40, requests=5, queued=300)
    ledger.commit("a", Work.of(50, 0), num_blocks=4)
    assert state(ledger) == (36, 6, 350)


def test_pairs_are_those_of_the_reports_and_of_what_they_do_not_contain_yet():
    ledger = Ledger(view())
    ledger.commit("long", Work.of(1000, 0), num_blocks=0)
    ledger.commit("cached", Work.of(100, 4000), num_blocks=0)
    assert ledger.view.queued == Work(1100, 1000 * 500 + 100 * 4050)
    ledger.sent("long", 1.0)
    ledger.acknowledged("long")
    ledger.report(num_free_blocks=9, num_requests=1, queued=Work(550, 1234.0), now_s=1.1)
    assert ledger.view.queued == Work(650, 1234.0 + 100 * 4050)


def test_an_answer_counts_where_it_will_run_until_the_reports_contain_it():
    ledger = Ledger(view())
    ledger.commit("here", NO_WORK, num_blocks=4, num_answer_tokens=50)
    ledger.commit("elsewhere", Work.of(70, 0), num_blocks=0)
    assert (ledger.view.num_decoding, ledger.view.num_context_tokens) == (1, 50)
    ledger.sent("here", 1.0)
    ledger.acknowledged("here")
    ledger.report(num_free_blocks=9, num_requests=3, queued=NO_WORK, now_s=1.1, num_decoding=3, num_context_tokens=90)
    assert (ledger.view.num_decoding, ledger.view.num_context_tokens) == (3, 90)


@given(
    st.lists(st.tuples(st.sampled_from(["commit", "sent", "ack", "computed", "release", "report"]), st.integers(0, 5)))
)
def test_after_all_is_released_only_the_reports_count(steps):
    ledger = Ledger(view())
    known = set()
    for now, (what, which) in enumerate(steps):
        name = str(which)
        if what == "commit" and name not in known:
            ledger.commit(name, Work.of(10, 0), num_blocks=1)
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


def test_an_unanswered_commitment_counts_until_the_second_report_after_it_was_sent():
    ledger = Ledger(view())
    ledger.commit("r", Work(40), num_blocks=3)

    def report(now_s: float) -> int:
        ledger.report(num_free_blocks=100, num_requests=0, queued=NO_WORK, now_s=now_s)
        return 100 - ledger.view.num_free_blocks

    assert report(1.0) == 3  # not sent yet
    ledger.sent("r", 5.0)
    assert report(4.9) == 3  # from before
    assert report(60.0) == 3  # it may have been on its way
    assert report(60.1) == 0


def test_two_reports_at_once_do_not_settle_what_was_sent_just_now():
    ledger = Ledger(view())
    ledger.commit("r", Work(40), num_blocks=3)
    ledger.sent("r", 5.0)
    for now_s, held in ((5.0, 3), (5.0, 3), (5.0 + SETTLE_S / 2, 3), (5.0 + 2 * SETTLE_S, 0)):
        ledger.report(num_free_blocks=100, num_requests=0, queued=NO_WORK, now_s=now_s)
        assert 100 - ledger.view.num_free_blocks == held
