"""Blocks of the pool as the transfer plane sees them: host memory, the pool's own or a stage before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.runner.device_link import DeviceLink
from shared.errors import TransferFailed


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
    """A pool on a GPU: every block passes through a pinned buffer of its own from torch's cache.

    Copies run on a stream of their own beside the steps; the caller waits for them, a few dozen microseconds a
    megabyte.
    """

    def __init__(self, kv_blocks: Tensor, link: DeviceLink) -> None:
        """Also works on a pool in host memory, for tests: the copies are then superfluous."""
        self._kv_blocks = kv_blocks  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
        self._link = link
        self._aside = link.side_stream()

    def outgoing(self, block_id: int) -> memoryview:
        """See `BlockAccess`; this is a copy."""
        buffer = self._buffer()
        with self._aside.entered():
            self._link.copy(self._kv_blocks[block_id], buffer)
        self._aside.synchronize()
        return _bytes_of(buffer)

    def incoming(self, block_id: int) -> memoryview:  # noqa: ARG002
        """See `BlockAccess`; any buffer serves."""
        return _bytes_of(self._buffer())

    def store(self, arrived: Sequence[tuple[int, memoryview]]) -> None:
        """See `BlockAccess`."""
        with self._aside.entered():
            for block_id, memory in arrived:
                block = self._kv_blocks[block_id]
                self._link.copy(torch.frombuffer(memory, dtype=block.dtype).view(block.shape), block)
        self._aside.synchronize()

    def _buffer(self) -> Tensor:
        """[num_layers, 2, num_kv_heads, block_size, head_dim]"""
        blocks = self._kv_blocks
        try:
            return torch.empty(blocks.shape[1:], dtype=blocks.dtype, pin_memory=blocks.is_cuda)
        except RuntimeError as error:  # torch's own out-of-memory errors are of this class
            num_bytes = blocks[0].numel() * blocks.element_size()
            raise TransferFailed(f"no buffer of {num_bytes} bytes for a block's transfer: {error}") from error


def _bytes_of(block: Tensor) -> memoryview:
    """A block's memory, writable, without a copy; it keeps the tensor alive."""
    return memoryview(block.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an ndarray is a buffer
