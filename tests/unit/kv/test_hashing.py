"""Content addresses: what changes a hash, and that chains can be grown."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.kv.hashing import HASH_BYTES, ChainRoots, block_hash, chain, extend_chain, root_hash
from shared.kv.layout import KVFormat

ROOT = root_hash("model", "float32", 1)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_block_hash_is_blake2b_of_parent_and_little_endian_ids() -> None:
    data = ROOT + bytes([1, 0, 0, 0, 0, 1, 0, 0])
    assert block_hash(ROOT, [1, 256]) == blake2b(data, digest_size=HASH_BYTES).digest()


def test_no_two_fields_of_the_root_can_be_confused() -> None:
    roots = [
        root_hash("ab", "c", 1),
        root_hash("a", "bc", 1),
        root_hash("ab", "c", 11),
        root_hash("ab", KVFormat("float32", 1, 8).name, 1),
        root_hash("ab", KVFormat("bfloat16", 1, 8).name, 1),
        root_hash("ab", "c", 1, adapter="x"),
        root_hash("ab", "c", 1, salt="x"),
        root_hash("ab", "c", 1, rope_len=1),
    ]
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {HASH_BYTES}


def test_prompts_of_every_length_share_a_root_where_the_rotation_is_fixed() -> None:
    roots = ChainRoots("model", "float32", 1)
    assert {roots.of("t", length) for length in (1, 40, 10_000)} == {root_hash("model", "float32", 1, salt="t")}


def test_prompts_beyond_a_dynamic_ropes_trained_length_share_with_those_of_their_own_length_alone() -> None:
    roots = ChainRoots("model", "float32", 1, rope_trained_len=40)
    assert roots.of("t", 1) == roots.of("t", 40) == root_hash("model", "float32", 1, salt="t")
    assert len({roots.of("t", length) for length in (40, 41, 42)}) == 3
    assert roots.of("t", 41) == ChainRoots("model", "float32", 1, rope_trained_len=40).of("t", 41)
    assert roots.of("t", 41) != roots.of("u", 41)
    assert roots.of("t", 41) != roots.of("t", 41, adapter="a")


@given(token_lists, st.integers(1, 9))
def test_chain_is_block_hash_applied_block_by_block(token_ids: list[int], block_size: int) -> None:
    parent, expected = ROOT, []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        expected.append(parent)
    assert chain(ROOT, token_ids, block_size) == expected


@given(token_lists, st.integers(1, 9), st.lists(st.integers(0, 70)))
def test_growing_a_chain_equals_building_it(token_ids: list[int], block_size: int, stops: list[int]) -> None:
    hashes: list[bytes] = []
    for stop in [*sorted(stops), len(token_ids)]:
        extend_chain(hashes, ROOT, token_ids[:stop], block_size)
    assert hashes == chain(ROOT, token_ids, block_size)


@pytest.mark.parametrize("bad", [-1, 2**32, "a"])
def test_ids_outside_u32_are_refused_by_name(bad: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        block_hash(ROOT, [bad])  # type: ignore[list-item]
    assert caught.value.field == "token_ids"
