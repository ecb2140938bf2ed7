"""Host memory that blocks pass through on their way to and from a GPU, pinned and registered once."""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from shared.errors import TransferFailed


class StagingRing:
    """Slots of one block each in one piece of memory, handed out in turn, and free again once released.

    A slot's memory is a memoryview; whatever is made from it keeps the slot. Without a free slot a block gets memory of
    its own: senders and receivers decide how long they hold theirs, and none can be made to wait here.
    """

    def __init__(self, num_slots: int, block_bytes: int, *, pinned: bool = False) -> None:
        """`pinned`: for blocks that pass to and from a CUDA device."""
        self._pinned = pinned
        self._block_bytes = block_bytes
        self._slots = self._allocate(num_slots)
        self._free = deque(range(num_slots))  # used from both ends by any thread: a slot ends where its holder does
        self.num_beyond = 0
        """Blocks that found no free slot."""

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self) -> memoryview:
        """Memory for one block, writable. Raises TransferFailed where there is none."""
        try:
            slot = self._free.popleft()
        except IndexError:
            self.num_beyond += 1
            return memoryview(self._allocate(1)[0].numpy())  # type: ignore[arg-type]  # an ndarray is a buffer
        array = self._slots[slot].numpy()  # an object of its own, which every view of it keeps
        weakref.finalize(array, self._free.append, slot).atexit = False
        return memoryview(array)  # type: ignore[arg-type]

    def _allocate(self, num_slots: int) -> Tensor:
        """[num_slots, block_bytes] uint8"""
        try:
            return torch.empty((num_slots, self._block_bytes), dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:  # torch's own out-of-memory errors are of this class
            num_bytes = num_slots * self._block_bytes
            raise TransferFailed(f"no buffer of {num_bytes} bytes for blocks' transfers: {error}") from error
