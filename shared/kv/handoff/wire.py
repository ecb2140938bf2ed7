"""Blocks as they leave for one receiver: packed where that is faster, and sealed."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from shared.kv.block_memory import BlockMemory, host_bytes
from shared.kv.handoff.link_rate import LinkRate
from shared.kv.packing import BlockPacking, Compression
from shared.kv.seal import Seal, SealedBlock
from shared.kv.transfer import TransferCounters


@dataclass(frozen=True, slots=True)
class ClosedBlock:
    """A block that is ready to leave."""

    sealed: SealedBlock
    packed: memoryview | None = None
    """Buffer of the packing, to be given back."""
    saved_bytes: int = 0
    """Bytes by which the packed block is smaller than the block."""

    @property
    def packed_bytes(self) -> int:
        """0 where it leaves as it is."""
        return 0 if self.packed is None else self.packed.nbytes


def close_packed(index: int, place: BlockMemory, packing: BlockPacking, seal: Seal | None) -> ClosedBlock:
    """A block, while a processor's cache holds it."""
    block = host_bytes(place)
    packed = packing.pack(block)
    leaving = block if packed is None else packed
    sealed = SealedBlock(leaving) if seal is None else seal.close_blocks([(index, leaving)])[0]
    return ClosedBlock(sealed, packed, block.nbytes - leaving.nbytes)


@dataclass(slots=True)
class Wire:
    """Packing for one receiver, and the link to it."""

    packer: BlockPacking
    link: LinkRate
    unpack_bytes_s: float
    """The receiver's."""
    mode: Compression
    same_host: bool = False
    """Whether both processes are on one host: nothing crosses a link, and `auto` does not pack."""

    def packing(self) -> BlockPacking | None:
        """What packs the next blocks; None: they leave as they are."""
        if self.unpack_bytes_s <= 0 or self.mode == "off":
            return None
        if self.mode == "on":
            return self.packer
        pays = not self.same_host and self.link.packs(self.packer.rates, self.unpack_bytes_s)
        return self.packer if pays else None

    async def timed(self, num_bytes: int, sending: Awaitable[None]) -> None:
        """Awaits `sending`, which sends `num_bytes`, and measures the link by the time that it takes."""
        self.link.began(num_bytes, time.perf_counter())
        taken = False
        try:
            await sending
            taken = True
        finally:
            self.link.ended(num_bytes, time.perf_counter(), taken=taken)

    def count(self, closed: Sequence[ClosedBlock], counters: TransferCounters) -> None:
        """Counts packed blocks that have gone, and gives their buffers back. Those of a send that failed are not kept,
        as sealed ones are not: something may still read them."""
        for item in closed:
            if item.packed is not None:
                counters.blocks_packed += 1
                counters.bytes_saved += item.saved_bytes
                self.packer.give_back(item.packed)
