"""The filters' limits, each from both sides."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.router.placement.filters import can_hold, candidates, has_queue_room
from services.router.placement.views import GUEST_AFTER_S, PlacementRequest, PrefixHits, Tier, WorkerView
from shared.kv.groups import KVGroups
from tests.unit.router.placement.builders import pool, prompt, view


@pytest.mark.parametrize(("num_requests", "holds"), [(7, True), (8, False), (9, False)])
def test_a_worker_takes_no_more_requests_than_its_batch_has_places(num_requests: int, holds: bool) -> None:
    assert can_hold(view(num_requests=num_requests, max_num_seqs=8), prompt(64)) is holds


@pytest.mark.parametrize(("num_free", "holds"), [(4, False), (5, True)])
def test_blocks_are_free_for_the_prompt_its_next_token_and_every_running_request(num_free: int, holds: bool) -> None:
    # 64 tokens and one more are five blocks of 16, of which the worker holds two; two requests may grow.
    assert can_hold(view("w", num_free_blocks=num_free, num_requests=2), prompt(64, w=32)) is holds


@pytest.mark.parametrize(
    ("num_free", "holds", "computes"), [(7, False, False), (8, True, False), (15, False, True), (16, True, True)]
)
def test_of_a_model_of_windows_alone_a_long_prompt_takes_the_blocks_of_its_windows(
    num_free: int, holds: bool, computes: bool
) -> None:
    # One token at a time, a window of 40 lies in four blocks of 16 and one of 5 in two; with a step's 64, in eight and
    # in six. The request that runs may grow by a block of each group.
    request = PlacementRequest(32_768, KVGroups(16, (40, 5)), PrefixHits())
    worker = view("w", num_free_blocks=num_free, num_requests=1, max_step_tokens=64)
    assert can_hold(worker, request, computes=computes) is holds


def test_who_accepts_nothing_is_passed_by() -> None:
    assert not can_hold(view(accepting=False), prompt(64))
    assert not has_queue_room(view(accepting=False), prompt(64), 100)


@pytest.mark.parametrize(("queued", "room"), [(0, True), (219, True), (220, False), (221, False)])
def test_a_queue_may_be_as_long_as_the_limit_and_what_a_hit_is_worth(queued: int, room: bool) -> None:
    assert has_queue_room(view("w", num_queued_tokens=queued), prompt(64, w=60), 100, patience=2.0) is room


def test_an_idle_worker_has_room_whatever_the_limit() -> None:
    assert has_queue_room(view(num_queued_tokens=0), prompt(64), 0)
    assert not has_queue_room(view(num_queued_tokens=1), prompt(64), 0)


@pytest.mark.parametrize(("queued", "room"), [(0, True), (19, True), (20, False), (21, False)])
def test_a_worker_of_another_router_is_taken_for_a_long_hit_alone(queued: int, room: bool) -> None:
    other = view("w", num_queued_tokens=queued, in_shard=False, exclusive_since_s=10.0)
    request = PlacementRequest(64, KVGroups(16), PrefixHits.of({"w": 60}), now_s=10.0)
    assert has_queue_room(other, request, 100, patience=2.0) is room
    assert not has_queue_room(other, PlacementRequest(64, KVGroups(16), now_s=10.0), 100)


def test_a_worker_of_another_router_counts_as_ones_own_once_it_was_left_alone_for_long_enough() -> None:
    other = view("w", num_queued_tokens=50, in_shard=False, exclusive_since_s=10.0)
    for now_s, room in ((10.0 + GUEST_AFTER_S, True), (9.99 + GUEST_AFTER_S, False)):
        assert has_queue_room(other, PlacementRequest(64, KVGroups(16), now_s=now_s), 100) is room
        later = replace(other, guest_after_s=2 * GUEST_AFTER_S)  # another router's turn comes first
        assert not has_queue_room(later, PlacementRequest(64, KVGroups(16), now_s=now_s), 100)
        assert has_queue_room(later, PlacementRequest(64, KVGroups(16), now_s=now_s + GUEST_AFTER_S), 100) is room


def test_only_workers_that_know_the_adapter_are_considered_also_where_they_failed_the_request() -> None:
    known, other = view("known", adapters={"A": Tier.HOST}), view("other", adapters={"B": Tier.READY})
    workers = pool(known, other, *(view(f"w{number}") for number in range(50)))
    for limit in (4, 100):
        for excluded in (frozenset[str](), frozenset({"known"})):
            request = replace(prompt(64), adapter="A", excluded=excluded)
            found = candidates(workers, can_hold, request, (), limit, random.Random(1))
            assert [item.name for item in found] == ["known"]
        assert not candidates(workers, can_hold, replace(prompt(64), adapter="C"), (), limit, random.Random(1))
        assert len(candidates(workers, can_hold, prompt(64), (), limit, random.Random(1))) >= 4


def test_a_worker_whose_slots_are_all_in_use_is_considered_where_the_others_lack_room_too() -> None:
    full = view("full", adapters={"A": Tier.HOST}, adapter_room=0)
    ready = view("ready", adapters={"A": Tier.READY}, adapter_room=0)
    roomy = view("roomy", adapters={"A": Tier.FOLDER}, adapter_room=1)
    request = replace(prompt(64), adapter="A")

    def found(*views: WorkerView, limit: int) -> set[str]:
        return {item.name for item in candidates(pool(*views), can_hold, request, (), limit, random.Random(1))}

    for limit in (1, 10):
        assert found(full, limit=limit) == {"full"}
    assert found(full, ready, roomy, limit=10) == {"ready", "roomy"}
    assert found(full, replace(roomy, adapter_room=None), limit=10) == {"roomy"}
    loading = replace(full, name="loading", loading_adapters=frozenset({"A"}))
    assert found(full, loading, limit=10) == {"loading"}, "a second load would be no quicker"
    assert found(full, replace(loading, loading_adapters=frozenset({"B"})), limit=10) == {"full", "loading"}
