"""Blocks pass through slots of one ring; a slot is used again when nobody holds its memory, and never before."""

from __future__ import annotations

import gc

import pytest
import torch

from shared.engine.runner.block_access import StagedBlocks, StagingRing
from shared.engine.runner.device_link import DeviceLink

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
    held = [staged.outgoing(block_id) for block_id in range(NUM_BLOCKS)]
    for block_id, memory in enumerate(held):
        assert bytes(memory) == pool[block_id].numpy().tobytes()


def test_what_arrives_is_stored_and_slots_serve_again(pool: torch.Tensor) -> None:
    staged = StagedBlocks(pool, DeviceLink(pool.device), num_slots=2)
    for round_number in range(3):
        arriving = [(block_id, staged.incoming(block_id)) for block_id in (4, 1)]
        for block_id, memory in arriving:
            memory[:] = bytes([16 * round_number + block_id]) * memory.nbytes
        staged.store(arriving)
        for block_id in (4, 1):
            assert set(pool[block_id].numpy().tobytes()) == {16 * round_number + block_id}
        del arriving, memory
        gc.collect()
    assert staged._ring.num_beyond == 0
    assert staged._ring.num_free == 2
