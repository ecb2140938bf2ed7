"""The admission queue keeps order, bounds and shares."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.queue import ORDERS, SPARE, AdmissionQueue, QueueEntry, TenantQueue, priority
from shared.errors import Overloaded


def item(name: str, num_tokens: int = 10, **more) -> QueueEntry:
    return QueueEntry(name, num_tokens, **more)


def drain(queue: AdmissionQueue[str], count: int = 1000) -> list[str]:
    taken: list[str] = []
    queue.admit(lambda entry: len(taken) < count and not taken.append(entry))
    return taken


def filled(order: str, *items: QueueEntry) -> AdmissionQueue[str]:
    queue: AdmissionQueue[str] = AdmissionQueue(100, order=ORDERS[order])
    for one in items:
        queue.push(one, one.request_id)
    return queue


def test_the_orders():
    items = [
        item("long", 90, arrived_s=1, deadline_s=9, priority=0),
        item("short", 10, arrived_s=2, deadline_s=20, priority=-1),
        item("late", 50, arrived_s=3, deadline_s=5, priority=3),
    ]
    assert drain(filled("fcfs", *items)) == ["long", "short", "late"]
    assert drain(filled("shortest", *items)) == ["short", "late", "long"]
    assert drain(filled("priority", *items)) == ["late", "long", "short"]
    assert drain(filled("deadline", *items)) == ["late", "long", "short"]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_equal_requests_go_by_arrival_and_a_returned_one_goes_first(order):
    queue = filled(order, *(item(name, arrived_s=1) for name in "abc"))
    queue.push_front(item("x", 1000, arrived_s=9, priority=-5), "x")
    assert drain(queue) == ["x", "a", "b", "c"]


def test_those_with_a_deadline_are_counted():
    queue = filled("fcfs", item("a", deadline_s=3.0), item("b"), item("c", deadline_s=5.0))
    assert queue.num_due == 2
    queue.remove("c")
    queue.remove("b")
    assert queue.num_due == 1
    assert drain(queue) == ["a"]
    assert queue.num_due == 0


def test_a_full_queue_refuses_with_its_limit_but_takes_a_returned_entry():
    queue: AdmissionQueue[str] = AdmissionQueue(1)
    queue.push(item("a"), "a")
    with pytest.raises(Overloaded) as refused:
        queue.push(item("b"), "b")
    assert (refused.value.field, refused.value.details["limit"]) == ("queue_limit", 1)
    queue.push_front(item("c"), "c")
    assert drain(queue) == ["c", "a"]


def test_tenants_get_tokens_by_their_weights():
    queue: AdmissionQueue[str] = AdmissionQueue(1000, tenant_weights={"gold": 3.0})
    for n in range(100):
        queue.push(item(f"g{n}", 10, tenant="gold"), "gold")
        queue.push(item(f"p{n}", 30, tenant="plain"), "plain")
    first = Counter(drain(queue, 60))
    tokens = {"gold": first["gold"] * 10, "plain": first["plain"] * 30}
    assert tokens["gold"] / tokens["plain"] == pytest.approx(3, rel=0.2)


def test_a_tenant_that_floods_does_not_hold_up_another_and_idleness_saves_nothing_up():
    queue: AdmissionQueue[str] = AdmissionQueue(1000)
    for n in range(50):
        queue.push(item(f"f{n}", tenant="flood"), "flood")
    assert drain(queue, 20) == ["flood"] * 20
    for n in range(5):
        queue.push(item(f"q{n}", tenant="quiet"), "quiet")
    # Not all five at once, as if its idle time were owed to it, and not behind the thirty that wait.
    assert Counter(drain(queue, 8)) == {"flood": 4, "quiet": 4}


operations = st.lists(
    st.tuples(
        st.sampled_from(["push", "front", "remove", "admit"]),
        st.integers(0, 7),  # which request
        st.sampled_from("ab"),  # tenant
        st.integers(1, 50),  # tokens
    ),
    max_size=40,
)


@given(operations, st.sampled_from(sorted(ORDERS)))
def test_nothing_is_lost_doubled_or_counted_wrong(steps, order):
    queue: AdmissionQueue[str] = AdmissionQueue(5, max_bytes=150, order=ORDERS[order])
    waiting: dict[str, int] = {}
    for operation, which, tenant, num_tokens in steps:
        name = str(which)
        one = QueueEntry(name, num_tokens, tenant=tenant, num_bytes=num_tokens, arrived_s=which, priority=which % 3)
        if operation == "push" and name not in waiting:
            full = len(waiting) >= 5 or (waiting and sum(waiting.values()) + num_tokens > 150)
            if full:
                with pytest.raises(Overloaded):
                    queue.push(one, name)
            else:
                queue.push(one, name)
                waiting[name] = num_tokens
        elif operation == "front" and name not in waiting:
            queue.push_front(one, name)
            waiting[name] = num_tokens
        elif operation == "remove":
            queue.remove(name)
            waiting.pop(name, None)
        elif operation == "admit":
            for taken in drain(queue, which):
                del waiting[taken]
        assert len(queue) == len(waiting)
        assert queue.num_bytes == sum(waiting.values())
    assert sorted(drain(queue)) == sorted(waiting)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.sampled_from(sorted(ORDERS)))
def test_one_tenants_entries_leave_in_the_order_of_their_keys(lengths, order):
    items = [item(str(n), length, arrived_s=n, deadline_s=length * 7 % 13) for n, length in enumerate(lengths)]
    expected = sorted(items, key=ORDERS[order])
    assert drain(filled(order, *items)) == [one.request_id for one in expected]


def test_many_tenants_that_came_and_went_leave_nothing_behind():
    queue: AdmissionQueue[str] = AdmissionQueue(10)
    queue.push(item("always", 10**9, tenant="always"), "always")
    for n in range(500):
        queue.push(item(str(n), 1, tenant=str(n)), "x")
        queue.remove(str(n))
    assert len(queue._queues) <= 3


def test_what_was_removed_behind_a_head_that_stays_leaves_nothing_behind():
    queue = TenantQueue(priority)
    for name in ("first", "second"):
        queue.push(item(name, priority=2), front=False)
    for number in range(1000):
        queue.push(item(f"r{number}"), front=False)
        queue.remove(f"r{number}")
    assert len(queue._heap) <= SPARE + 4
    assert (queue.head().request_id, queue.num_tokens, len(queue)) == ("first", 20, 2)


def test_the_last_byte_may_be_used_and_an_empty_queue_takes_any_size():
    queue: AdmissionQueue[str] = AdmissionQueue(10, max_bytes=100)
    queue.push(item("whole", num_bytes=1000), "whole")
    queue.remove("whole")
    queue.push(item("a", num_bytes=60), "a")
    queue.push(item("b", num_bytes=40), "b")
    assert queue.num_bytes == 100
    queue.check(0)
    with pytest.raises(Overloaded) as refused:
        queue.check(1)
    assert (refused.value.field, refused.value.details["limit"]) == ("queue_limit_bytes", 100)


@pytest.mark.parametrize(("num_tokens", "turns"), [(0, "ababab"), (1, "ababab"), (2, "abbabb"), (3, "abbbab")])
def test_turns_go_by_started_tokens_and_none_is_free(num_tokens, turns):
    queue: AdmissionQueue[str] = AdmissionQueue(100)
    for number in range(9):
        queue.push(item(f"a{number}", num_tokens, tenant="a"), "a")
        queue.push(item(f"b{number}", 1, tenant="b"), "b")
    assert "".join(drain(queue, 6)) == turns


def test_tokens_ahead_are_ones_own_and_the_others_share_by_weight():
    queue: AdmissionQueue[str] = AdmissionQueue(100, tenant_weights={"heavy": 4.0, "new": 2.0})
    queue.push(item("own", 30, tenant="new"), "x")
    queue.push(item("h", 1000, tenant="heavy"), "x")
    queue.push(item("l", 1000, tenant="light"), "x")
    # (30 + 10) / 2 = 20 a weight of 1: 80 tokens of the heavy one's and 20 of the light one's.
    assert queue.num_tokens_ahead(item("next", 10, tenant="new")) == 30 + 80 + 20
    assert queue.num_tokens_ahead(item("h2", 40, tenant="heavy")) == 1000 + 30 + 260  # (1000 + 40) / 4
