"""Blocks of the pool as the transfer plane sees them: the pool's own memory, or a stage before it in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.runner.block_sums import BlockSums
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.staging_ring import StagingRing
from shared.kv.block_memory import BlockMemory, DeviceBytes, host_bytes

STAGING_BYTES = 256 << 20
"""Pinned host memory that blocks of a GPU's pool pass through."""


class BlockAccess(Protocol):
    """Called from the event loop while the engine thread computes, only for blocks that no step writes to. Where ranks
    have pools of their own, `outgoing` and `store` raise RankLost once the group has lost one."""

    def outgoing(self, block_id: int) -> BlockMemory:
        """A block's bytes, to be sent; they hold while the caller has its reference to the block.

        Raises TransferFailed where there is no memory to stage it in.
        """
        ...

    def incoming(self, block_id: int) -> BlockMemory:
        """Memory for a block that will arrive. Keep it until no sender can write to it any more.

        Raises TransferFailed where there is none.
        """
        ...

    def store(self, arrived: Sequence[tuple[int, BlockMemory]]) -> None:
        """Moves arrived blocks into the pool before it returns: (block id, the memory `incoming` gave for it)."""
        ...


class DirectBlocks:
    """A pool in host memory: sent from and received into as it is."""

    def __init__(self, kv_blocks: Tensor) -> None:
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]

    def outgoing(self, block_id: int) -> memoryview:
        """See `BlockAccess`."""
        return _bytes_of(self._kv_blocks[block_id])

    def incoming(self, block_id: int) -> memoryview:
        """See `BlockAccess`."""
        return _bytes_of(self._kv_blocks[block_id])

    def store(self, arrived: Sequence[tuple[int, BlockMemory]]) -> None:
        """Nothing to do: `incoming` gave the pool's own memory."""


class DeviceBlocks:
    """A pool on a GPU, sent from and received into in place by transfers that take device pointers.

    Nothing else orders the transfer with the GPU's streams, so the host does: a block is named here when the result of
    the step that wrote it was read, or when no step in flight writes to it; for queued copies of blocks both ways wait.
    What arrived has ended before its sequence joins, so every kernel that reads it is launched later.
    """

    def __init__(self, kv_blocks: Tensor, link: DeviceLink, sums: BlockSums) -> None:
        """`sums`: of these blocks. Also works on a pool in host memory, for tests."""
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]
        self._link = link
        self._sums = sums
        self._aside = link.side_stream()

    def outgoing(self, block_id: int) -> DeviceBytes:
        """See `BlockAccess`."""
        return self._bytes_of(block_id)

    def incoming(self, block_id: int) -> DeviceBytes:
        """See `BlockAccess`."""
        return self._bytes_of(block_id)

    def store(self, arrived: Sequence[tuple[int, BlockMemory]]) -> None:
        """Nothing to do: `incoming` gave the pool's own memory."""

    def _bytes_of(self, block_id: int) -> DeviceBytes:
        """Waits until no queued copy reads or writes the block any more."""
        with self._aside.entered():
            pass
        self._aside.synchronize()
        block = self._kv_blocks[block_id]
        num_bytes = block.numel() * block.element_size()
        return DeviceBytes(block.data_ptr(), num_bytes, partial(self._checksum, block_id), self._kv_blocks)

    def _checksum(self, block_id: int) -> int:
        self._link.bind_thread()  # arrivals are checked on threads of their own
        return self._sums.of([block_id])[0]


class StagedBlocks:
    """A pool on a GPU: every block passes through a slot of one ring of pinned memory.

    Copies run on a stream of their own beside the steps; the caller waits for them, a few dozen microseconds a
    megabyte.
    """

    def __init__(self, kv_blocks: Tensor, link: DeviceLink, num_slots: int | None = None) -> None:
        """`num_slots`: None = of STAGING_BYTES. Also works on a pool in host memory, for tests: the copies are then
        superfluous."""
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]
        self._link = link
        self._aside = link.side_stream()
        block_bytes = kv_blocks[0].numel() * kv_blocks.element_size()
        most = min(kv_blocks.shape[0], STAGING_BYTES // block_bytes)
        self._ring = StagingRing(most if num_slots is None else num_slots, block_bytes, pinned=kv_blocks.is_cuda)

    def outgoing(self, block_id: int) -> memoryview:
        """See `BlockAccess`; this is a copy."""
        memory = self._ring.take()
        block = self._kv_blocks[block_id]
        with self._aside.entered():
            self._link.copy(block, _staged(memory, block))
        self._aside.synchronize()
        return memory

    def incoming(self, block_id: int) -> memoryview:  # noqa: ARG002
        """See `BlockAccess`; any slot serves."""
        return self._ring.take()

    def store(self, arrived: Sequence[tuple[int, BlockMemory]]) -> None:
        """See `BlockAccess`; all copies are queued before any is waited for."""
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
