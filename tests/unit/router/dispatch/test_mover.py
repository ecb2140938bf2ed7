"""What the policy of moves is given of a running answer."""

from __future__ import annotations

from services.router.dispatch.active_request import ActiveRequest, WriteCoalescer
from services.router.dispatch.mover import running_answer
from services.router.dispatch.request import Request
from shared.engine.sampling_params import SamplingParams
from shared.kv.groups import KVGroups


async def test_an_answer_takes_blocks_of_the_size_that_the_fleet_has_now():
    """A fleet that all workers have left may come back with another layout."""
    active = ActiveRequest(Request("r", tuple(range(31)), SamplingParams(seed=1, max_tokens=8)), WriteCoalescer())
    assert [running_answer(active, KVGroups(size), now=1.0).num_blocks for size in (16, 32, 8)] == [2, 1, 4]
    active.produced.append(7)
    assert [running_answer(active, KVGroups(size), now=1.0).num_blocks for size in (16, 32, 8)] == [3, 2, 5]


async def test_an_answer_has_left_what_its_limit_leaves():
    active = ActiveRequest(Request("r", (5,), SamplingParams(seed=1, max_tokens=8)), WriteCoalescer())
    left = []
    for count in (0, 3, 9):  # a client that resumes may have more than it asks for now
        active.produced[:] = range(count)
        left.append(running_answer(active, KVGroups(16), now=1.0).max_left)
    assert left == [8, 5, 0]
