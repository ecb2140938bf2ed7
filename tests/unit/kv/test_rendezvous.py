"""Runs of blocks on store nodes: all choose alike, loads are even, and no run moves without need."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.kv.hashing import chain, root_hash
from shared.kv.rendezvous import RUN_BLOCKS, by_keeper, keeper

NODES = st.sets(st.text("abcdefgh.:-0123456789", min_size=1, max_size=12), min_size=1, max_size=8)
RUNS = st.binary(min_size=16, max_size=16)
ROOT = root_hash("model", "float32", 1)


def hashes(count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


@given(RUNS, NODES, st.randoms())
def test_the_order_in_which_nodes_are_known_is_no_matter(run, nodes, rng):
    shuffled = list(nodes)
    rng.shuffle(shuffled)
    assert keeper(run, shuffled) == keeper(run, sorted(nodes)) in nodes


@given(st.lists(RUNS, min_size=1, max_size=30), NODES, st.text("xyz", min_size=1))
def test_a_node_more_or_less_moves_its_own_runs_alone(runs, nodes, name):
    """Read forwards a node is added, backwards it is lost."""
    for run in runs:
        before, after = keeper(run, nodes), keeper(run, {*nodes, name})
        assert after in (before, name)


def test_nodes_keep_equal_shares_and_a_lost_ones_are_shared_out_equally():
    nodes = [f"store-{i}" for i in range(4)]
    runs = hashes(4000)
    before = {run: keeper(run, nodes) for run in runs}
    shares = Counter(before.values())
    assert all(abs(shares[node] - 1000) < 120 for node in nodes)  # four standard deviations
    moved = Counter(keeper(run, nodes[1:]) for run in runs if before[run] == nodes[0])
    assert all(abs(moved[node] - shares[nodes[0]] / 3) < 70 for node in nodes[1:])


def test_conversations_on_one_system_prompt_load_all_nodes_alike():
    """The prompt ends in the middle of a run, so all conversations go on at one node, until that run ends."""
    nodes = [f"store-{i}" for i in range(4)]
    system = list(range(26 * 16))
    kept: set[tuple[str, bytes]] = set()
    for number in range(800):
        names = chain(ROOT, [*system, *(number * 7 + i for i in range(16 * 16))], 16)
        for node, indexes in by_keeper(names, range(len(names)), nodes).items():
            kept |= {(node, names[index]) for index in indexes}
    assert len(kept) == 26 + 800 * 16
    shares = Counter(node for node, _ in kept)
    assert max(shares.values()) < 0.35 * len(kept)
    assert min(shares.values()) > 0.2 * len(kept)
    shared = {node for node, name in kept if name in set(chain(ROOT, system, 16))}
    assert len(shared) == 4


@given(st.integers(1, 60), st.data())
def test_a_block_is_kept_where_its_run_is_whatever_of_the_chain_is_asked_for(num_blocks, data):
    names = hashes(num_blocks)
    nodes = ["a", "b", "c"]
    whole = {i: node for node, indexes in by_keeper(names, range(num_blocks), nodes).items() for i in indexes}
    assert sorted(whole) == list(range(num_blocks))
    for index, node in whole.items():
        assert node == whole[index - index % RUN_BLOCKS]
    some = sorted(data.draw(st.sets(st.sampled_from(range(num_blocks)))))
    # One that knows no more of the chain than up to the last of them agrees too.
    part = by_keeper(names[: max(some, default=-1) + 1], some, nodes)
    assert sorted(i for indexes in part.values() for i in indexes) == some
    assert all(whole[i] == node for node, indexes in part.items() for i in indexes)


def test_without_nodes_nothing_is_kept():
    assert by_keeper(hashes(3), range(3), []) == {}
