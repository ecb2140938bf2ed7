"""Where the bytes of a block lie that is sent or received: in host memory, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
