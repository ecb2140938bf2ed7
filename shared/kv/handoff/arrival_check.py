"""Whether blocks are what they were where they were made: in the memory where they arrive, beside the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.kv.block_memory import BlockMemory, DeviceBytes, host_bytes
from shared.kv.checksum_weights import checksum_weights, weighted_sum
from shared.kv.handoff.beside_loop import beside_loop
from shared.kv.seal import Seal
from shared.rpc.pb.tandem.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Announced:
    """What its sender says of a block."""

    checksum: int
    tag: bytes = b""
    """By the seal, where there is one."""


def announcements(trailer: types_pb2.HandoffTrailer) -> list[tuple[int, Announced]]:
    """(block index, its entry) of each block that a note or trailer names."""
    tags = trailer.block_tags or [b""] * len(trailer.block_indexes)
    named = zip(trailer.block_indexes, trailer.checksums, tags, strict=True)
    return [(index, Announced(checksum, tag)) for index, checksum, tag in named]


class ArrivalCheck:
    """Checks blocks of one size; holds a checksum's weights, 8 bytes a word."""

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes` is a multiple of 8."""
        self.block_bytes = block_bytes
        self._weights = checksum_weights(block_bytes // 8)

    async def sound(self, blocks: Sequence[tuple[int, BlockMemory, Announced]], seal: Seal | None = None) -> list[bool]:
        """Of each (block index, bytes, what was announced), which a `seal` opens in place: so a block is checked once.

        Nothing else may write to the bytes meanwhile. Runs to its end, also where the caller is cancelled.
        """
        return await beside_loop(len(blocks) * self.block_bytes, lambda: self._check(blocks, seal))

    def checksum(self, block: BlockMemory) -> int:
        """In [0, 2^64). Of a block on a GPU by the GPU."""
        if isinstance(block, DeviceBytes):
            return block.checksum()
        return weighted_sum(np.frombuffer(block, np.dtype("<u8")), self._weights)

    def _check(self, blocks: Sequence[tuple[int, BlockMemory, Announced]], seal: Seal | None) -> list[bool]:
        return [
            (seal is None or seal.open_block(index, host_bytes(memory), announced.tag))
            and self.checksum(memory) == announced.checksum
            for index, memory, announced in blocks
        ]
