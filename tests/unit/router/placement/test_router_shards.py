"""Several routers deal the workers out alike, without a word to each other."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.commitments import Ledger
from services.router.placement.policy import Placement, PlacementConfig
from services.router.placement.views import (
    GUEST_AFTER_S,
    GUEST_TURN_S,
    Pool,
    Replicas,
    Work,
    guest_times_s,
    own_workers,
)
from tests.unit.router.placement.builders import pool, prompt, view

names = st.sets(st.text("abcdef0123", min_size=1, max_size=4), max_size=8)


@given(st.sets(st.text("pd0123456789", min_size=1, max_size=4), max_size=30), names)
def test_every_worker_has_one_owner_and_owners_have_equally_many(workers, routers):
    owned = Counter(worker for router in routers for worker in own_workers(workers, router, sorted(routers)))
    if len(workers) >= len(routers) > 0:
        assert set(owned) == workers
        assert all(count == 1 for count in owned.values())
        shares = [len(own_workers(workers, router, sorted(routers))) for router in routers]
        assert max(shares) - min(shares) <= 1
    assert own_workers(workers, "nobody", sorted(routers)) == workers


def test_where_there_are_fewer_workers_than_routers_all_are_everybodys():
    assert own_workers({"p0"}, "r1", ["r0", "r1"]) == {"p0"}


@given(st.sets(st.text("pd0123456789", min_size=1, max_size=4), min_size=8, max_size=30), names)
def test_guests_of_a_worker_have_a_turn_each(workers, routers):
    for worker in workers:
        guests = [router for router in routers if worker not in own_workers(workers, router, sorted(routers))]
        times = sorted(guest_times_s(workers, router, sorted(routers))[worker] for router in guests)
        assert times == [GUEST_AFTER_S + GUEST_TURN_S * turn for turn in range(len(guests))]


@given(st.lists(st.tuples(st.sampled_from("abcd"), names.map(sorted)), max_size=20))
def test_who_serves_the_fleet_is_whom_some_worker_names(told):
    replicas, known = Replicas(), {}
    for worker, routers in told:
        before = set(replicas.names)
        known[worker] = routers
        changed = replicas.update_routers(worker, routers)
        assert set(replicas.names) == {name for each in known.values() for name in each}
        assert changed == (set(replicas.names) != before)


def fleet(*reports: tuple[str, list[str]]) -> Pool:
    made = Pool("r1")
    for number in range(4):
        made.add(view(f"p{number}"))
    for worker, routers in reports:
        made.update_routers(worker, routers)
    return made


def homes(made: Pool) -> set[str]:
    return {one.name for one in made if one.in_shard}


def test_a_pool_knows_its_routers_own_workers_as_others_come_and_go():
    assert homes(fleet()) == {"p0", "p1", "p2", "p3"}
    two = fleet(("p0", ["r0", "r1"]))
    assert homes(two) == {"p1", "p3"}
    two.add(view("p00"))
    assert homes(two) == {"p00", "p2"}
    two.remove("p00")
    two.update_routers("p0", [])
    assert homes(two) == {"p0", "p1", "p2", "p3"}
    gone = fleet(("p0", ["r0", "r1"]))
    gone.remove("p0")  # the only one that named them
    assert homes(gone) == {"p1", "p2", "p3"}


def test_a_ledger_knows_since_when_no_other_router_had_a_prompt_there():
    ledger = Ledger(view(exclusive_since_s=math.inf))

    def report(num_queued_tokens: int, now_s: float) -> float:
        ledger.report(num_free_blocks=9, num_requests=0, queued=Work(num_queued_tokens), now_s=now_s)
        return ledger.view.exclusive_since_s

    assert report(5, 0.5) == math.inf
    assert (report(0, 1.0), report(0, 2.0)) == (1.0, 1.0)
    ledger.commit("r", Work.of(10, 0), num_blocks=1)
    assert report(10, 3.0) == 1.0
    assert report(11, 4.0) == math.inf
    ledger.computed("r")
    assert report(1, 5.0) == math.inf
    assert report(0, 6.0) == 6.0
    ledger.release("r")
    ledger.commit("s", Work.of(10, 0), num_blocks=1)
    ledger.release("s")
    assert report(1, 7.0) == math.inf


def test_a_router_takes_its_own_of_equal_workers_and_anothers_that_is_clearly_better():
    decodes = pool(view("d"))
    prefills = pool(view("mine", num_queued_tokens=40), view("other", in_shard=False))
    placement = Placement(PlacementConfig())
    assert {placement.choose(prompt(), decodes, prefills, collocated=False).prefill for _ in range(20)} == {"mine"}
    prefills = pool(view("mine", num_queued_tokens=1500), view("other", in_shard=False))
    assert {placement.choose(prompt(), decodes, prefills, collocated=False).prefill for _ in range(20)} == {"other"}


def test_a_router_that_is_alone_draws_among_true_equals_only():
    prefills = pool(view("a", num_queued_tokens=40), view("b"))
    placement = Placement(PlacementConfig(tie_margin=0.5))
    chosen = {placement.choose(prompt(), pool(view("d")), prefills, collocated=False).prefill for _ in range(20)}
    assert chosen == {"b"}
