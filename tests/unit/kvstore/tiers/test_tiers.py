"""What holds for every tier: content, order of eviction, admission, events, damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from services.kvstore.tiers.arena import HostArena
from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.disk import HEADER_BYTES, DiskTier
from shared.errors import ConfigError
from shared.kv.checksum import BlockChecksum
from tests.examples import examples
from tests.unit.kvstore.tiers.blocks import BLOCK_BYTES, HASHES, block, put, read
from tests.unit.kvstore.tiers.conftest import MakeTier


@given(st.binary(min_size=8, max_size=200).map(lambda data: data[: len(data) // 8 * 8]))
def test_the_checksum_is_the_workers(data: bytes) -> None:
    words = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert block_checksum(memoryview(data)) == BlockChecksum(len(data) // 8).checksum(words)


def test_the_least_recently_used_goes_first(make_tier: MakeTier) -> None:
    tier = make_tier(3)
    for number in (0, 1, 2):
        put(tier, number)
    read(tier, 0)
    put(tier, 1)
    put(tier, 3)
    put(tier, 4)
    assert [read(tier, number) is not None for number in range(5)] == [False, True, False, True, True]
    assert tier.counters.num_evicted == 2


def test_a_full_tier_takes_what_is_offered_twice(make_tier: MakeTier) -> None:
    tier = make_tier(2)
    for number in (0, 1):
        assert tier.wants(HASHES[number], BLOCK_BYTES)
        put(tier, number)
    assert not tier.wants(HASHES[0], BLOCK_BYTES)
    assert not tier.wants(HASHES[2], BLOCK_BYTES)
    assert not tier.wants(HASHES[3], BLOCK_BYTES)
    assert tier.wants(HASHES[2], BLOCK_BYTES)
    assert not tier.wants(HASHES[4], 1 << 30)
    assert tier.counters.num_refused == 3


def test_a_block_that_is_not_what_its_checksum_says_is_not_taken(make_tier: MakeTier) -> None:
    tier = make_tier(2)
    with pytest.raises(ValueError, match="checksum"):
        tier.put(HASHES[0], memoryview(block(0)), 1)
    assert read(tier, 0) is None


def test_a_reader_that_expects_another_size_loses_no_block(make_tier: MakeTier) -> None:
    tier = make_tier(2)
    put(tier, 0)
    for size in (8, BLOCK_BYTES + 8):
        with pytest.raises(ValueError, match=f"{BLOCK_BYTES} bytes, not {size}"):
            tier.read(HASHES[0], memoryview(bytearray(size)))
    assert (read(tier, 0), tier.counters.num_bad) == (block(0), 0)


def test_a_budget_too_small_for_one_block_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        HostArena(BLOCK_BYTES - 1, BLOCK_BYTES)
    assert caught.value.details == {"field": "host_bytes", "limit": BLOCK_BYTES}
    with pytest.raises(ConfigError) as caught:
        DiskTier(tmp_path, BLOCK_BYTES, BLOCK_BYTES)
    assert caught.value.details == {"field": "disk_bytes", "limit": BLOCK_BYTES + HEADER_BYTES}


@given(bit=st.integers(0, 8 * BLOCK_BYTES - 1))
@examples(30)
def test_a_flipped_bit_in_host_memory_is_found(bit: int) -> None:
    tier = HostArena(4 * BLOCK_BYTES, BLOCK_BYTES)
    tier.start()
    put(tier, 0)
    put(tier, 1)
    assert tier._slots is not None
    tier._slots[tier._places[HASHES[0]][0]][bit // 8] ^= np.uint8(1 << bit % 8)
    assert read(tier, 0) is None
    assert (tier.counters.num_bad, read(tier, 1)) == (1, block(1))
    put(tier, 0)
    assert read(tier, 0) == block(0)
    tier.close()


@given(st.lists(st.tuples(st.sampled_from(["put", "read", "drain"]), st.integers(0, 11)), max_size=40))
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_use_keeps_to_the_budget_and_to_the_truth(make_tier: MakeTier, uses: list[tuple[str, int]]) -> None:
    tier = make_tier(4)
    published: set[bytes] = set()
    try:
        for use, number in [*uses, ("drain", 0)]:
            if use == "put":
                put(tier, number)
            elif use == "read":
                assert read(tier, number) in (None, block(number))
            else:
                events = tier.drain_events()
                published = (published | {*events.sealed}) - {*events.evicted}
            assert tier.blocks.used_bytes <= 4 * (BLOCK_BYTES + HEADER_BYTES) + 7
        assert {HASHES[i] for i in range(12) if read(tier, i) is not None} == published
    finally:
        tier.close()
