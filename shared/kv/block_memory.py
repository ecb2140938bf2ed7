"""Where the bytes of a block lie that is sent or received, in host memory or on a GPU, and work over those bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from shared.tasks import unbroken

AT_ONCE_BYTES = 64 << 10
"""Up to this many bytes are read on the loop, within some 50 µs: a thread would take longer to wake."""
PART_BYTES = 16 << 20
"""What a thread reads in two milliseconds, far longer than it takes to wake."""
MOST_PARTS = 4
T = TypeVar("T")
Item = TypeVar("Item")
Words = npt.NDArray[np.uint64]


class DeviceSums(Protocol):
    """Sums over blocks of one pool on a GPU as they are then, by the GPU; for any thread, which waits for them."""

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """Checksums, in [0, 2^64)."""
        ...

    def by_keys(self, block_ids: Sequence[int], keys: Words) -> list[int]:
        """`multilinear.ExactSum` of each block's words and the keys, [words of a block]."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class DeviceBytes:
    """One block of a pool on a GPU, for transfers that take device pointers."""

    pointer: int
    nbytes: int
    """Bytes of the block, one after another."""
    block_id: int
    sums: DeviceSums
    """Checksums of its pool, which they keep allocated."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3 of the interface (Numba's documentation). Without a stream: no work on the bytes is queued while
        they are sent or received."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }


BlockMemory = memoryview | DeviceBytes


class AsSent(NamedTuple):
    """A block in another form than the pool has it in."""

    memory: memoryview
    checksum: int
    """Checksum of these bytes."""


def host_bytes(memory: BlockMemory) -> memoryview:
    """For what reads bytes on the host, which no part may ask of a block on a GPU: that is a bug."""
    assert isinstance(memory, memoryview), "a block on a GPU has no bytes on the host"
    return memory


@dataclass(frozen=True, slots=True)
class DeviceBlockIds:
    """Blocks of one pool on a GPU."""

    sums: DeviceSums
    block_ids: list[int]


def on_device(blocks: Sequence[BlockMemory]) -> DeviceBlockIds | None:
    """The blocks by their ids where they lie on a GPU, all in one pool; None for blocks in host memory, or none."""
    placed = [block for block in blocks if isinstance(block, DeviceBytes)]
    if not placed:
        return None
    assert len(placed) == len(blocks), "blocks on a GPU and on the host at once"
    assert all(block.sums is placed[0].sums for block in placed), "blocks of several pools at once"
    return DeviceBlockIds(placed[0].sums, [block.block_id for block in placed])


async def beside_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Returns the result of `work`, which reads `num_bytes`. It runs to its end even where the caller is cancelled, and
    the cancel is raised only then: until then the bytes stay in use."""
    if num_bytes <= AT_ONCE_BYTES:
        return work()
    return await unbroken(asyncio.to_thread(work))


async def each_beside_loop(
    items: Sequence[Item], memory: Sequence[BlockMemory], work: Callable[[Sequence[Item]], list[T]]
) -> list[T]:
    """As `beside_loop`, of work that gives a result for each item, whose block's `memory` it reads. Several threads
    share many blocks in host memory, at most half as many as there are processors; a GPU gets all of its own at once.
    """
    num_bytes = sum(block.nbytes for block in memory)
    parts = min(MOST_PARTS, len(os.sched_getaffinity(0)) // 2, num_bytes // PART_BYTES)
    if parts < 2 or on_device(memory) is not None:
        return await beside_loop(num_bytes, lambda: work(items))
    size = -(-len(items) // parts)

    async def share() -> list[T]:
        starts = range(0, len(items), size)
        tasks = [asyncio.create_task(asyncio.to_thread(work, items[start : start + size])) for start in starts]
        await asyncio.wait(tasks)  # all: until then the bytes stay in use
        return [result for task in tasks for result in task.result()]

    return await unbroken(share())


class LeavingBlocks(Protocol):
    """The part of `BlockAccess` that senders need."""

    @property
    def waits_for_copies(self) -> bool:
        """See `BlockAccess`."""
        ...

    def outgoing(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """See `BlockAccess`."""
        ...


async def leaving(blocks: LeavingBlocks, block_ids: Sequence[int]) -> list[BlockMemory]:
    """Their `outgoing` memory, without the event loop waiting for a GPU. Raises as that does."""
    if blocks.waits_for_copies:
        return await unbroken(asyncio.to_thread(blocks.outgoing, block_ids))
    return blocks.outgoing(block_ids)
