"""Blocks of the pool as the transfer plane sees them: the pool's own memory, or a stage before it in host memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.pool_memory import free_bytes
from shared.errors import TransferFailed
from shared.kernels.block_ops import BlockOps
from shared.kv.block_memory import BlockMemory, DeviceBytes, Words, host_bytes
from shared.kv.checksum import BlockChecksum
from shared.kv.layout import BlockLayout

LEAST_STAGING_BYTES, MOST_STAGING_BYTES = 256 << 20, 2 << 30
"""Pinned host memory that blocks of a GPU's pool pass through: at most two prompts of 8,192 tokens of an 8B model."""


def staging_bytes(free_bytes: int) -> int:
    """For this much free host memory: a sixteenth of it, within the bounds. What a receiver takes at once is a whole
    prompt, and a block beyond the ring is pinned when it comes, which takes about a millisecond."""
    return max(LEAST_STAGING_BYTES, min(MOST_STAGING_BYTES, free_bytes // 16))


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


class BlockSums:
    """On a CUDA device by the backend's kernel on a stream of its own; in host memory by `BlockChecksum`."""

    def __init__(self, layout: BlockLayout, kv_blocks: Tensor, kernels: BlockOps, link: DeviceLink) -> None:
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, num_planes, num_kv_heads, head_bytes] uint8
        self._kernels = kernels
        self._link = link
        self._aside = link.side_stream()
        self._on_host = None if kv_blocks.is_cuda else BlockChecksum(layout.block_bytes // 8, kv_blocks.device)
        self._keys: tuple[Words, Tensor] | None = None  # and where they lie on the device

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """Checksums of these blocks as they are now, behind the copies that were queued; no step in flight may write
        to them. Waits for the device."""
        self._link.bind_thread()
        with self._aside.entered():
            if self._on_host is not None:
                return self._on_host.checksum_blocks(self._kv_blocks, block_ids)
            sums = self._kernels.block_checksums(self._kv_blocks, self._ids(block_ids))
            return [value % (1 << 64) for value in sums.tolist()]

    def by_keys(self, block_ids: Sequence[int], keys: Words) -> list[int]:
        """See `DeviceSums`; likewise."""
        self._link.bind_thread()
        with self._aside.entered():
            if self._keys is None or self._keys[0] is not keys:
                self._keys = keys, torch.from_numpy(keys.view(np.int64).copy()).to(self._kv_blocks.device)
            parts = self._kernels.block_key_sums(self._kv_blocks, self._ids(block_ids), self._keys[1]).tolist()
        return [sum(part << 32 * place for place, part in enumerate(row)) for row in parts]

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        return self._link.send(torch.tensor(block_ids, dtype=torch.int64))


class BlockAccess(Protocol):
    """Called from the event loop while the engine thread computes, only for blocks that no step writes to. Where ranks
    have pools of their own, `outgoing` and `store` raise RankLost once the group has lost one."""

    @property
    def waits_for_copies(self) -> bool:
        """True where `outgoing` and `store` wait for a GPU, and may be called from any thread: the event loop's should
        not."""
        ...

    def outgoing(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """The bytes of each block, to be sent; they hold while the caller has its reference to the block.

        Raises TransferFailed where there is no memory to stage them in.
        """
        ...

    def incoming(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """Memory for each of these blocks, which will arrive. Keep it until no sender can write to it any more.

        Raises TransferFailed where there is none.
        """
        ...

    def store(self, arrived: Sequence[tuple[int, BlockMemory]]) -> None:
        """Moves arrived blocks into the pool before it returns: (block id, the memory `incoming` gave for it)."""
        ...


class DirectBlocks:
    """A pool in host memory: sent from and received into as it is."""

    waits_for_copies = False

    def __init__(self, kv_blocks: Tensor) -> None:
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, num_planes, num_kv_heads, head_bytes] uint8

    def outgoing(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """See `BlockAccess`."""
        return [_bytes_of(self._kv_blocks[block_id]) for block_id in block_ids]

    def incoming(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """See `BlockAccess`."""
        return self.outgoing(block_ids)

    def store(self, arrived: Sequence[tuple[int, BlockMemory]]) -> None:
        """Nothing to do: `incoming` gave the pool's own memory."""


class DeviceBlocks:
    """A pool on a GPU, sent from and received into in place by transfers that take device pointers.

    Nothing else orders the transfer with the GPU's streams, so the host does: a block is named here when the result of
    the step that wrote it was read, or when no step in flight writes to it; for queued copies of blocks both ways wait.
    What arrived has ended before its sequence joins, so every kernel that reads it is launched later.
    """

    waits_for_copies = False

    def __init__(self, kv_blocks: Tensor, link: DeviceLink, sums: BlockSums) -> None:
        """`sums`: of these blocks. Also works on a pool in host memory, for tests."""
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, num_planes, num_kv_heads, head_bytes] uint8
        self._link = link
        self._sums = sums
        self._aside = link.side_stream()
        self._begin = kv_blocks.data_ptr()
        self._block_bytes = kv_blocks[0].numel() * kv_blocks.element_size()

    def outgoing(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """See `BlockAccess`. Waits until no queued copy reads or writes the blocks any more."""
        with self._aside.entered():
            pass
        self._aside.synchronize()
        return [
            DeviceBytes(self._begin + block_id * self._block_bytes, self._block_bytes, block_id, self._sums)
            for block_id in block_ids
        ]

    def incoming(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """See `BlockAccess`; as `outgoing`."""
        return self.outgoing(block_ids)

    def store(self, arrived: Sequence[tuple[int, BlockMemory]]) -> None:
        """Nothing to do: `incoming` gave the pool's own memory."""


class StagedBlocks:
    """A pool on a GPU: every block passes through a slot of one ring of pinned memory.

    Copies run on a stream of their own beside the steps; the caller waits for them, a few dozen microseconds a
    megabyte.
    """

    waits_for_copies = True

    def __init__(self, kv_blocks: Tensor, link: DeviceLink, num_slots: int | None = None) -> None:
        """`num_slots`: None = of `staging_bytes`. Also works on a pool in host memory, for tests: the copies are then
        superfluous."""
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, num_planes, num_kv_heads, head_bytes] uint8
        self._link = link
        self._aside = link.side_stream()
        block_bytes = kv_blocks[0].numel() * kv_blocks.element_size()
        most = min(kv_blocks.shape[0], staging_bytes(free_bytes(torch.device("cpu"))) // block_bytes)
        self._ring = StagingRing(most if num_slots is None else num_slots, block_bytes, pinned=kv_blocks.is_cuda)

    def outgoing(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """See `BlockAccess`; these are copies, all queued before any is waited for."""
        self._link.bind_thread()
        memory = [self._ring.take() for _ in block_ids]
        with self._aside.entered():
            for block_id, place in zip(block_ids, memory, strict=True):
                block = self._kv_blocks[block_id]
                self._link.copy(block, _staged(place, block))
        self._aside.synchronize()
        return list(memory)

    def incoming(self, block_ids: Sequence[int]) -> list[BlockMemory]:
        """See `BlockAccess`; any slot serves."""
        return [self._ring.take() for _ in block_ids]

    def store(self, arrived: Sequence[tuple[int, BlockMemory]]) -> None:
        """See `BlockAccess`; all copies are queued before any is waited for."""
        self._link.bind_thread()
        with self._aside.entered():
            for block_id, memory in arrived:
                block = self._kv_blocks[block_id]
                self._link.copy(_staged(host_bytes(memory), block), block)
        self._aside.synchronize()


def _staged(memory: BlockMemory, block: Tensor) -> Tensor:
    """The memory as a tensor of the block's shape and dtype."""
    return torch.frombuffer(memory, dtype=block.dtype).view(block.shape)


def _bytes_of(block: Tensor) -> memoryview:
    """A block's memory, writable, without a copy; it keeps the tensor alive."""
    return memoryview(block.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an ndarray is a buffer
