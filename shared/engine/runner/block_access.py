"""Blocks of the pool as the transfer plane sees them: host memory, the pool's own or a stage before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.staging_ring import StagingRing

STAGING_BYTES = 256 << 20
"""Pinned host memory that blocks of a GPU's pool pass through."""


class BlockAccess(Protocol):
    """Called from the event loop while the engine thread computes, only for blocks that no step writes to."""

    def outgoing(self, block_id: int) -> memoryview:
        """A block's bytes, to be sent; they hold while the caller has its reference to the block.

        Raises TransferFailed where there is no memory to stage it in.
        """
        ...

    def incoming(self, block_id: int) -> memoryview:
        """Memory for a block that will arrive. Keep it until no sender can write to it any more.

        Raises TransferFailed where there is none.
        """
        ...

    def store(self, arrived: Sequence[tuple[int, memoryview]]) -> None:
        """Moves arrived blocks into the pool before it returns: (block id, the memory `incoming` gave for it)."""
        ...


class DirectBlocks:
    """A pool in host memory: sent from and received into as it is."""

    def __init__(self, kv_blocks: Tensor) -> None:
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]

    def outgoing(self, block_id: int) -> memoryview:
        """See `BlockAccess`."""
        return _bytes_of(self._kv_blocks[block_id])

    def incoming(self, block_id: int) -> memoryview:
        """See `BlockAccess`."""
        return _bytes_of(self._kv_blocks[block_id])

    def store(self, arrived: Sequence[tuple[int, memoryview]]) -> None:
        """Nothing to do: `incoming` gave the pool's own memory."""


class StagedBlocks:
    """A pool on a GPU: every block passes through a slot of one ring of pinned memory.

    Copies run on a stream of their own beside the steps; the caller waits for them, a few dozen microseconds a
    megabyte.
    """

    def __init__(self, kv_blocks: Tensor, link: DeviceLink, num_slots: int | None = None) -> None:
        """`num_slots`: None = of STAGING_BYTES. Also works on a pool in host memory, for tests: the copies are then
        superfluous."""
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
        self._link = link
        self._aside = link.side_stream()
        block_bytes = kv_blocks[0].numel() * kv_blocks.element_size()
        most = min(kv_blocks.shape[0], STAGING_BYTES // block_bytes)
        self._ring = StagingRing(most if num_slots is None else num_slots, kv_blocks)

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

    def store(self, arrived: Sequence[tuple[int, memoryview]]) -> None:
        """See `BlockAccess`; all copies are queued before any is waited for."""
        with self._aside.entered():
            for block_id, memory in arrived:
                block = self._kv_blocks[block_id]
                self._link.copy(_staged(memory, block), block)
        self._aside.synchronize()


def _staged(memory: memoryview, block: Tensor) -> Tensor:
    """The memory as a tensor of the block's shape and dtype."""
    return torch.frombuffer(memory, dtype=block.dtype).view(block.shape)


def _bytes_of(block: Tensor) -> memoryview:
    """A block's memory, writable, without a copy; it keeps the tensor alive."""
    return memoryview(block.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an ndarray is a buffer
