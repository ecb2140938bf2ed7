"""Blocks pass through slots of one ring; a slot is used again when nobody holds its memory, and never before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence

import pytest
import torch

from shared.engine.runner.block_access import StagedBlocks, StagingRing, staging_bytes
from shared.engine.runner.device_link import DeviceLink
from shared.kv.block_memory import BlockMemory, leaving

NUM_BLOCKS = 6


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.rand(NUM_BLOCKS, 2, 2, 1, 16, 8)


def test_a_slot_is_free_again_when_the_last_view_of_it_is_gone() -> None:
    ring = StagingRing(2, 2048)
    held, other = ring.take(), ring.take()
    part = held[5:9]
    kept = torch.frombuffer(other, dtype=torch.float32)
    del held, other
    gc.collect()
    assert ring.num_free == 0
    part[0] = 7
    del part
    gc.collect()
    assert ring.num_free == 1
    del kept
    gc.collect()
    assert ring.num_free == 2
    assert ring.num_beyond == 0


def test_held_memory_is_nobody_elses_and_beyond_the_ring_there_is_more(pool: torch.Tensor) -> None:
    staged = StagedBlocks(pool, DeviceLink(pool.device), num_slots=3)
    held = staged.outgoing(range(NUM_BLOCKS))
    for block_id, memory in enumerate(held):
        assert bytes(memory) == pool[block_id].numpy().tobytes()


def test_what_arrives_is_stored_and_slots_serve_again(pool: torch.Tensor) -> None:
    staged = StagedBlocks(pool, DeviceLink(pool.device), num_slots=2)
    for round_number in range(3):
        arriving = list(zip((4, 1), staged.incoming((4, 1)), strict=True))
        for block_id, memory in arriving:
            memory[:] = bytes([16 * round_number + block_id]) * memory.nbytes
        staged.store(arriving)
        for block_id in (4, 1):
            assert set(pool[block_id].numpy().tobytes()) == {16 * round_number + block_id}
        del arriving, memory
        gc.collect()
    assert staged._ring.num_beyond == 0
    assert staged._ring.num_free == 2


async def test_the_event_loop_does_not_copy_what_a_gpus_pool_sends(pool: torch.Tensor) -> None:
    loop_thread, threads = threading.get_ident(), []

    class Noting(StagedBlocks):
        def outgoing(self, block_ids: Sequence[int]) -> list[BlockMemory]:
            threads.append(threading.get_ident())
            return super().outgoing(block_ids)

    sent = await leaving(Noting(pool, DeviceLink(pool.device), num_slots=3), [4, 1])
    assert [bytes(memory) for memory in sent] == [pool[block_id].numpy().tobytes() for block_id in (4, 1)]
    assert loop_thread not in threads
    assert len(threads) == 1


@pytest.mark.parametrize(("free", "expected"), [(0, 256 << 20), (16 << 30, 1 << 30), (1 << 40, 2 << 30)])
def test_the_ring_grows_with_the_hosts_free_memory_within_bounds(free: int, expected: int) -> None:
    assert staging_bytes(free) == expected
