"""Blocks that are swapped between device and host: what reads or writes them beside the steps waits for the copies,
on a device that does nothing before it must."""

from __future__ import annotations

import ctypes

import pytest
import torch

from shared.engine.plan import BlockCopy
from shared.engine.runner.block_access import BlockSums, DeviceBlocks, StagedBlocks
from shared.engine.runner.pool_memory import HostArena
from shared.kernels.torch_backend import TorchKernels
from shared.kv.block_memory import DeviceBytes
from shared.kv.checksum import BlockChecksum
from shared.kv.layout import BlockLayout, KVFormat
from tests.unit.engine.runner.delayed_streams import DelayedLink

LAYOUT = BlockLayout(2, 16, KVFormat("float32", num_kv_heads=1, head_dim=8))
OUT, IN = [BlockCopy(1, 0, to_host=True)], [BlockCopy(2, 0, to_host=False)]


class Swapping:
    """A pool of four blocks with one slot of host memory, as a runner has them."""

    def __init__(self) -> None:
        self.link = DelayedLink()
        self.pool = torch.randint(256, LAYOUT.shape(4), dtype=torch.uint8)
        self.before = self.pool.clone()
        self.arena = HostArena(LAYOUT, 1, self.pool, self.link)
        self.staged = StagedBlocks(self.pool, self.link)
        self.sums = BlockSums(LAYOUT, self.pool, TorchKernels(), self.link)
        self.direct = DeviceBlocks(self.pool, self.link, self.sums)

    def bytes_before(self, block_id: int) -> bytes:
        return self.before[block_id].numpy().tobytes()


@pytest.fixture
def swapping() -> Swapping:
    return Swapping()


def test_nothing_is_copied_before_somebody_waits(swapping: Swapping) -> None:
    swapping.arena.run(OUT + IN)
    assert torch.equal(swapping.pool, swapping.before)
    swapping.link.streams.main.synchronize()
    assert torch.equal(swapping.pool[2], swapping.before[1])


def test_a_block_swapped_in_is_sent_as_it_is_then(swapping: Swapping) -> None:
    swapping.arena.run(OUT + IN)
    assert bytes(swapping.staged.outgoing([2])[0]) == swapping.bytes_before(1)


def test_the_checksum_of_a_block_swapped_in_is_not_that_of_what_lay_there(swapping: Swapping) -> None:
    swapping.arena.run(OUT + IN)
    expected = BlockChecksum(LAYOUT.block_bytes // 8).checksum_blocks(swapping.before, [1, 3])
    assert swapping.sums.of([2, 3]) == expected


def test_a_block_swapped_out_is_copied_before_another_one_arrives_there(swapping: Swapping) -> None:
    swapping.arena.run(OUT)
    memory = swapping.staged.incoming([1])[0]
    memory[:] = bytes(LAYOUT.block_bytes)
    swapping.staged.store([(1, memory)])
    assert not swapping.pool[1].any()
    swapping.arena.run(IN)
    assert bytes(swapping.staged.outgoing([2])[0]) == swapping.bytes_before(1)


def bytes_at(memory: DeviceBytes) -> bytes:
    """What a device pointer leads to."""
    pointer, is_read_only = memory.__cuda_array_interface__["data"]  # type: ignore[misc]
    assert not is_read_only
    return ctypes.string_at(pointer, memory.nbytes)


def test_a_block_swapped_in_is_there_when_its_pointer_is_given_away(swapping: Swapping) -> None:
    swapping.arena.run(OUT + IN)
    memory = swapping.direct.outgoing([2])[0]
    assert bytes_at(memory) == swapping.bytes_before(1)
    expected = BlockChecksum(LAYOUT.block_bytes // 8).checksum_blocks(swapping.before, [1])
    assert memory.sums.of([memory.block_id]) == expected


def test_a_block_swapped_out_was_copied_before_a_receive_may_write_there(swapping: Swapping) -> None:
    swapping.arena.run(OUT)
    memory = swapping.direct.incoming([1])[0]
    swapping.pool[1].zero_()  # as a sender would, from now on
    assert bytes_at(memory) == bytes(LAYOUT.block_bytes)
    swapping.direct.store([(1, memory)])
    swapping.arena.run(IN)
    assert bytes_at(swapping.direct.outgoing([2])[0]) == swapping.bytes_before(1)


def test_pointers_to_blocks_that_were_not_swapped_are_given_without_waiting_for_steps(swapping: Swapping) -> None:
    swapping.link.streams.main.queue.append(lambda: pytest.fail("the running step was waited for"))
    assert bytes_at(swapping.direct.outgoing([3])[0]) == swapping.bytes_before(3)
    swapping.link.streams.main.queue.clear()


def test_each_side_stream_waits_for_the_last_copies_alone(swapping: Swapping) -> None:
    waits = []
    stream = swapping.link.side_stream()
    for copies in (OUT, OUT, IN):
        swapping.arena.run(copies)
        with stream.entered():
            waits = swapping.link.streams.current.waited_for
    assert [event.end for event in waits] == [1, 2, 3]
    assert all(event.stream is swapping.link.streams.main for event in waits)


def test_work_beside_steps_that_swapped_nothing_waits_for_nothing(swapping: Swapping) -> None:
    with swapping.link.side_stream().entered():
        assert swapping.link.streams.current.waited_for == []
