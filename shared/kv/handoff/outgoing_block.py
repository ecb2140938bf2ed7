"""A block on its way out of a pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutgoingBlock:
    """A block to send. The sender owns one reference on it, and gives it back when the memory may be reused."""

    sequence_id: str
    index: int  # in the sequence's block table, or in the list of hashes that was asked for
    block_id: int
    known_checksum: int | None  # None: not computed yet; the engine fills it in before a sender sees the block
    receiver: bytes = b""  # transfer address that it is for, where the pool counts unsent blocks by receiver

    @property
    def checksum(self) -> int:
        """The checksum, which must be known by now."""
        assert self.known_checksum is not None, f"block {self.block_id} has no checksum yet"
        return self.known_checksum
