"""Keys by bucket: nothing is lost or mixed up, and the buckets spread evenly over a cluster's slots."""

from __future__ import annotations

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.index.holder_table import TABLE_TAG, VERSION_KEY
from services.kvstore.index.redis_index import NUM_CLUSTER_BUCKETS, NUM_SLOTS, Buckets, slot_of
from services.kvstore.resp.command import Command
from tests.integration.kvstore.workers import hashes

LAYOUTS = {"single": Buckets.single(), "cluster": Buckets.cluster()}
chains = st.lists(st.binary(min_size=16, max_size=16), max_size=40)


def words(command: Command) -> list[bytes]:
    """The command's parts, as a server reads them."""
    reader = hiredis.Reader()
    reader.feed(command.packed)
    parts = reader.gets()
    assert isinstance(parts, list)
    return parts


def test_slots_are_those_of_the_redis_cluster_specification() -> None:
    assert slot_of(b"123456789") == 0x31C3 % NUM_SLOTS


@pytest.mark.parametrize("num_nodes", [2, 3, 5, 7, 16])
def test_every_node_of_a_cluster_serves_its_share_of_the_buckets(num_nodes: int) -> None:
    slots = LAYOUTS["cluster"].slots
    assert len(set(slots)) == NUM_CLUSTER_BUCKETS
    shares = [sum(1 for slot in slots if slot * num_nodes // NUM_SLOTS == node) for node in range(num_nodes)]
    assert max(shares) <= 1.15 * NUM_CLUSTER_BUCKETS / num_nodes


def test_a_buckets_keys_lie_in_its_slot() -> None:
    for prefix, slot in zip(LAYOUTS["cluster"].prefixes, LAYOUTS["cluster"].slots, strict=True):
        assert slot_of(prefix[1:-1]) == slot


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(chain=chains, max_hashes=st.integers(1, 5))
def test_parts_hold_every_hash_once_and_in_order(layout: Buckets, chain: list[bytes], max_hashes: int) -> None:
    found: dict[int, list[bytes]] = {}
    for part in layout.parts(b"".join(chain), max_hashes):
        assert 0 < len(part.hashes) <= 16 * max_hashes
        split = [part.hashes[i : i + 16] for i in range(0, len(part.hashes), 16)]
        found.setdefault(part.bucket, []).extend(split)
    assert sorted(h for split in found.values() for h in split) == sorted(chain)
    for bucket, split in found.items():
        assert split == [h for h in chain if h[0] % len(layout.prefixes) == bucket]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(chain=chains.filter(bool))
def test_a_read_asks_for_every_key_and_puts_the_answers_in_the_chains_order(
    layout: Buckets, chain: list[bytes]
) -> None:
    read = layout.read(b"".join(chain), VERSION_KEY)
    asked = [words(command) for command in read.commands]
    if layout is LAYOUTS["single"]:
        assert asked == [[b"MGET", VERSION_KEY, *(b"b:" + h for h in chain)]]
        replies: list[object] = [[b"version", *(layout.hash_of(key) for key in asked[0][2:])]]
    else:
        assert asked[0] == [b"GET", VERSION_KEY]
        assert read.commands[0].slot == slot_of(TABLE_TAG)
        for command, parts in zip(read.commands[1:], asked[1:], strict=True):
            assert parts[0] == b"MGET"
            assert {slot_of(key[1 : key.index(b"}")]) for key in parts[1:]} == {command.slot}
        replies = [b"version", *([layout.hash_of(key) for key in parts[1:]] for parts in asked[1:])]
    assert read.collect(replies) == (b"version", chain)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_other_keys_are_no_blocks(layout: Buckets) -> None:
    [block] = hashes(1)
    assert layout.hash_of(layout.prefixes[0] + block) == block
    for key in (VERSION_KEY, layout.prefixes[0], b"??" + block, layout.prefixes[0] + block + b"x"):
        assert layout.hash_of(key) is None
