"""From whom each block of a prefix is had."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.blocks.prefix_fetch.fetch_policy import PIECE_BLOCKS, plan_fetch

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
