"""What a sender says of its blocks, and whether those that arrived are these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory, each_beside_loop, host_bytes, on_device
from shared.kv.checksum_weights import checksum_weights, weighted_sum
from shared.kv.packing import BlockPacking
from shared.kv.seal import Seal
from shared.rpc.pb.tandem.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Announced:
    """A sender's announcement of one block."""

    checksum: int
    tag: bytes = b""
    """Tag of the block by the seal, where there is one."""
    packed_bytes: int = 0
    """As it arrives; 0: as it is."""


def announcements(trailer: types_pb2.HandoffTrailer) -> list[tuple[int, Announced]]:
    """(block index, its entry) of each block that a note or trailer names."""
    tags = trailer.block_tags or [b""] * len(trailer.block_indexes)
    sizes = trailer.packed_bytes or [0] * len(trailer.block_indexes)
    named = zip(trailer.block_indexes, trailer.checksums, tags, sizes, strict=True)
    return [(index, Announced(checksum, tag, size)) for index, checksum, tag, size in named]


class ArrivalCheck:
    """Checks blocks of one size; holds a checksum's weights, 8 bytes a word."""

    def __init__(self, block_bytes: int, packing: BlockPacking | None = None) -> None:
        """`block_bytes` is a multiple of 8. With a `packing` blocks in host memory may arrive packed."""
        self.block_bytes = block_bytes
        self.packing = packing
        self._weights = checksum_weights(block_bytes // 8)

    async def sound(self, blocks: Sequence[tuple[int, BlockMemory, Announced]], seal: Seal | None = None) -> list[bool]:
        """Whether each (block index, bytes, what was announced) arrived whole; a `seal` opens it in place, so a block
        is checked once.

        Nothing else may write to the bytes meanwhile. Runs to its end, also where the caller is cancelled.
        """
        memory = [place for _, place, _ in blocks]
        # On the host one by one: a processor's cache holds a block, which is read twice.
        at_once = 1 if on_device(memory) is None else len(blocks)

        def check(part: Sequence[tuple[int, BlockMemory, Announced]]) -> list[bool]:
            starts = range(0, len(part), at_once)
            return [sound for start in starts for sound in self._check(part[start : start + at_once], seal)]

        return await each_beside_loop(blocks, memory, check)

    def checksum(self, block: BlockMemory) -> int:
        """In [0, 2^64). Of a block on a GPU by the GPU."""
        return self._checksums([block])[0]

    def _check(self, blocks: Sequence[tuple[int, BlockMemory, Announced]], seal: Seal | None) -> list[bool]:
        opened = [True] * len(blocks)
        if seal is not None:
            opened = seal.open_blocks(
                [(index, _arrived(memory, announced), announced.tag) for index, memory, announced in blocks]
            )
        opened = [
            is_ours and self._unpacked(memory, announced.packed_bytes)
            for is_ours, (_, memory, announced) in zip(opened, blocks, strict=True)
        ]
        sums = self._checksums([memory for _, memory, _ in blocks])
        return [
            is_ours and total == announced.checksum
            for is_ours, total, (_, _, announced) in zip(opened, sums, blocks, strict=True)
        ]

    def _unpacked(self, memory: BlockMemory, packed_bytes: int) -> bool:
        """Unpacks a block that arrived packed; False where its bytes are damaged."""
        if not packed_bytes:
            return True
        assert self.packing is not None, "sizes are checked where they are announced"
        try:
            self.packing.unpack(host_bytes(memory), packed_bytes)
        except TransferFailed:
            return False
        return True

    def _checksums(self, blocks: Sequence[BlockMemory]) -> list[int]:
        held = on_device(blocks)
        if held is not None:
            return held.sums.of(held.block_ids)
        return [weighted_sum(np.frombuffer(host_bytes(block), np.dtype("<u8")), self._weights) for block in blocks]


def _arrived(memory: BlockMemory, announced: Announced) -> BlockMemory:
    """The part of a block's memory that its message filled."""
    return host_bytes(memory)[: announced.packed_bytes] if announced.packed_bytes else memory
