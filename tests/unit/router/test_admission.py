"""The admission queue keeps order and bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.queue import AdmissionQueue
from shared.errors import Overloaded


def test_first_come_first_served_and_the_head_blocks_the_rest():
    queue = AdmissionQueue(8)
    for name in "abc":
        queue.push(name, name)
    started = []
    assert queue.admit(lambda entry: entry != "b" and not started.append(entry)) == 1
    assert started == ["a"]
    assert len(queue) == 2


def test_a_full_queue_refuses_with_its_limit_but_takes_a_returned_entry():
    queue = AdmissionQueue(1)
    queue.push("a", "a")
    with pytest.raises(Overloaded) as refused:
        queue.push("b", "b")
    assert refused.value.details["limit"] == 1
    queue.push_front("c", "c")
    order = []
    queue.admit(lambda entry: not order.append(entry))
    assert order == ["c", "a"]


@given(st.lists(st.tuples(st.sampled_from(["push", "front", "remove", "admit"]), st.integers(0, 5))))
def test_like_a_list(operations):
    queue, model = AdmissionQueue(4), []
    for operation, value in operations:
        name = str(value)
        if operation == "push" and name not in model:
            if len(model) >= 4:
                with pytest.raises(Overloaded):
                    queue.push(name, value)
            else:
                queue.push(name, value)
                model.append(name)
        elif operation == "front" and name not in model:
            queue.push_front(name, value)
            model.insert(0, name)
        elif operation == "remove":
            queue.remove(name)
            model = [entry for entry in model if entry != name]
        elif operation == "admit":
            taken = []
            queue.admit(lambda entry, n=value, t=taken: len(t) < n and not t.append(str(entry)))
            assert taken == model[:value]
            model = model[value:]
        assert len(queue) == len(model)
