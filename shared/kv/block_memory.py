"""Where the bytes of a block lie that is sent or received, in host memory or on a GPU, and work over those bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shared.tasks import unbroken

AT_ONCE_BYTES = 64 << 10
"""Up to this many bytes are read on the loop, within some 50 µs: a thread would take longer to wake."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class DeviceBytes:
    """One block of a pool on a GPU, for transfers that take device pointers."""

    pointer: int
    nbytes: int
    """Of the block, one after another."""
    checksum: Callable[[], int]
    """Of the bytes as they are then, by the device; may block."""
    owner: object
    """What keeps the memory allocated."""

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


def host_bytes(memory: BlockMemory) -> memoryview:
    """For what reads bytes on the host, which no part may ask of a block on a GPU: that is a bug."""
    assert isinstance(memory, memoryview), "a block on a GPU has no bytes on the host"
    return memory


async def beside_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Returns the result of `work`, which reads `num_bytes`. It runs to its end even where the caller is cancelled, and
    the cancel is raised only then: until then the bytes stay in use."""
    if num_bytes <= AT_ONCE_BYTES:
        return work()
    return await unbroken(asyncio.to_thread(work))


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
