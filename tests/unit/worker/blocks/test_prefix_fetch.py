"""Prefixes of other workers: from whom, whether it pays, and what arrives."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.blocks.exchange_client import BlockExchangeClient
from services.worker.blocks.prefix_fetch.fetch_policy import (
    HOLD_SHARE,
    MARGIN,
    MAX_LINKS,
    MIN_HOLD_S,
    PIECE_BLOCKS,
    SLOWEST,
    UNKNOWN_HOLD_S,
    FetchPolicy,
    plan_fetch,
)
from shared.engine.messages import AdoptBlocks, BlocksAdopted, CacheFlushed, FlushCache, HoldBlocks


class Sent:
    """An engine that keeps what it is sent."""

    def __init__(self) -> None:
        self.commands: list[AdoptBlocks | FlushCache | HoldBlocks] = []

    def submit(self, command):
        self.commands.append(command)


def test_adopted_blocks_are_told_of_before_the_engines_next_event_in_the_order_of_the_commands():
    """The engine's events may come together: a first token behind them must find its fetched blocks counted."""
    engine, told = Sent(), []
    client = BlockExchangeClient(engine.submit)
    client.adopt("f", {0: 7}, 0, lambda answer: told.append(("first", answer.indexes)))
    client.adopt("f", {1: 8}, 1, lambda answer: told.append(("second", answer.indexes)))
    assert [(command.checksums, command.num_damaged) for command in engine.commands] == [({0: 7}, 0), ({1: 8}, 1)]
    client.on_event(BlocksAdopted("f", (0,)))
    assert told == [("first", (0,))]
    client.on_event(BlocksAdopted("f", ()))
    assert told == [("first", (0,)), ("second", ())]


async def test_an_answer_whose_caller_was_cancelled_is_dropped():
    engine = Sent()
    client = BlockExchangeClient(engine.submit)
    cancelled, asking = asyncio.create_task(client.flush()), asyncio.create_task(client.flush())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.sleep(0)
    for command, num_blocks in zip(engine.commands, (1, 2), strict=True):
        client.on_event(CacheFlushed(command.key, num_blocks))
    assert await asking == 2
    assert cancelled.cancelled()


INDEXES = st.sets(st.integers(0, 80))


def sources(letter: str):
    return st.lists(INDEXES, max_size=3).map(lambda held: {f"{letter}{i}": indexes for i, indexes in enumerate(held)})


@given(INDEXES, sources("p"), sources("s"))
def test_every_block_that_somebody_has_comes_once_from_one_that_has_it_peers_first(missing, peers, stores):
    plan = plan_fetch(missing, peers, stores)
    planned = [index for indexes in plan.values() for index in indexes]
    by_peers, by_stores = set().union(*peers.values()), set().union(*stores.values())
    assert sorted(planned) == sorted(missing & (by_peers | by_stores))
    for source, indexes in plan.items():
        assert indexes == sorted(indexes) != []
        assert set(indexes) <= {**peers, **stores}[source]
        assert source in peers or not by_peers & set(indexes)


@given(st.integers(1, 4), st.integers(1, 200))
def test_peers_that_hold_the_same_send_equally_much_to_a_piece(num_peers, num_blocks):
    plan = plan_fetch(range(num_blocks), {f"p{i}": set(range(num_blocks)) for i in range(num_peers)}, {})
    sent = [len(plan.get(f"p{i}", [])) for i in range(num_peers)]
    assert max(sent) - min(sent) <= PIECE_BLOCKS


def test_a_store_fills_in_what_the_peer_has_lost():
    assert plan_fetch(range(2, 8), {"p": {2, 3, 6}}, {"s": set(range(8))}) == {"p": [2, 3, 6], "s": [4, 5, 7]}


SECONDS = st.floats(1e-6, 1e3)


@given(SECONDS, SECONDS)
def test_a_request_is_never_held_for_more_than_a_share_of_computing(fetch_s, compute_s):
    policy = FetchPolicy()
    policy.note_fetch("a", 1000, fetch_s)
    policy.note_compute(100, compute_s)
    assert 0 < policy.hold_s({"a": 1000}, 100) <= max(MIN_HOLD_S, compute_s * 1.001)
    pays = policy.pays("a", 1000, 100)
    if fetch_s < compute_s:
        assert pays
    if fetch_s > 1.001 * SLOWEST * compute_s:
        assert not pays


def test_a_fetch_that_ends_soon_is_waited_for_and_a_slow_one_computed_beside():
    policy = FetchPolicy()
    assert policy.hold_s({"a": 1000}, 100) == UNKNOWN_HOLD_S
    policy.note_compute(100, 1.0)
    assert policy.hold_s({"a": 1000}, 100) == pytest.approx(HOLD_SHARE)
    policy.note_fetch("a", 1000, 0.2)
    policy.note_fetch("b", 1000, 0.8)
    assert policy.hold_s({"a": 1000}, 100) == pytest.approx(MARGIN * 0.2)
    assert policy.hold_s({"a": 1000, "b": 100}, 100) == pytest.approx(MARGIN * 0.2)  # side by side
    assert policy.hold_s({"a": 1000, "b": 1000}, 100) == MIN_HOLD_S
    assert policy.hold_s({"a": 1000, "c": 1}, 100) == pytest.approx(HOLD_SHARE)


def test_a_link_that_was_too_slow_is_tried_again_some_day_and_says_nothing_of_others():
    policy = FetchPolicy()
    policy.note_compute(100, 1.0)
    policy.note_fetch("a", 1000, 100.0)
    assert policy.pays("b", 1000, 100)
    assert any(policy.pays("a", 1000, 100) for _ in range(40))


def test_links_that_were_not_used_for_longest_are_forgotten():
    policy = FetchPolicy()
    policy.note_compute(100, 1.0)
    for number in range(MAX_LINKS + 1):
        policy.note_fetch(f"{number}", 1000, 1e6)
    assert policy.pays("0", 1000, 100)
    assert not policy.pays("1", 1000, 100)


@pytest.mark.parametrize(("mode", "fetches"), [("always", True), ("never", False)])
def test_modes_for_comparison_ask_nobody(mode, fetches):
    policy = FetchPolicy(mode)
    policy.note_compute(100, 1e-6)
    policy.note_fetch("a", 1, 1e6)
    assert policy.enabled is policy.pays("a", 1 << 30, 16) is fetches
