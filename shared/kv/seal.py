"""What protects the blocks and messages of one ticket on the transfer plane; both sides make the same seal for it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory
from shared.kv.multilinear import MultilinearHash

MAC_BYTES = 16


class Purpose(Enum):
    """What a ticket is for. Each purpose has keys of its own: what was sealed for one is refused by the others."""

    HANDOFF = b"handoff"
    """Purpose of blocks from a prefill worker to a decode worker."""
    FETCH = b"fetch"
    """Purpose of blocks to a worker that asked a peer or a store node."""
    OFFER = b"offer"
    """Purpose of blocks from a worker to a store node."""
    WEIGHTS = b"weights"
    """Purpose of model files for a worker that starts."""


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block as it crosses."""

    wire: BlockMemory
    """As long as what was sealed: the block, or its packed form."""
    tag: bytes = b""
    """Reaches the receiver another way than the block; empty without a seal."""


class Seal(Protocol):
    """Seals and opens the blocks of one ticket, in any thread, several at once."""

    tag_bytes: int
    """Bytes of each block's tag; a message grows by as much."""

    def close_blocks(self, blocks: Sequence[tuple[int, BlockMemory]]) -> list[SealedBlock]:
        """Seals (block index, its bytes), which stay as they are; reads every byte, so call it where that may take its
        time."""
        ...

    def give_back(self, block: SealedBlock) -> None:
        """Frees the block's `wire`, which is not read any more."""
        ...

    def open_blocks(self, blocks: Sequence[tuple[int, BlockMemory, bytes]]) -> list[bool]:
        """Makes of what arrived, (block index, bytes, tag), the blocks that were sealed, in place; each only once.

        False where one is not a block of this ticket and index, with this tag; then nothing is known of the memory's
        content.
        """
        ...

    def close_message(self, number: int, body: bytes) -> bytes:
        """A note or the trailer, the ticket's message of this number, from 0 on; longer by `tag_bytes`."""
        ...

    def open_message(self, number: int, data: bytes) -> bytes:
        """Its body. Raises TransferFailed for a message of another ticket, another number, or another sender."""
        ...


class TagSeal:
    """Tags of 16 bytes beside what crosses as it is: they cannot be forged without the key.

    `repr` shows no secret.
    """

    tag_bytes = MAC_BYTES

    def __init__(self, key: bytes, block_hash: MultilinearHash) -> None:
        """`key` belongs to purpose and ticket."""
        self._key = key
        self._hash = block_hash

    def __repr__(self) -> str:
        return "TagSeal()"

    def close_blocks(self, blocks: Sequence[tuple[int, BlockMemory]]) -> list[SealedBlock]:
        """See `Seal`; nothing is copied."""
        hashes = self._hash.of([memory for _, memory in blocks])
        return [
            SealedBlock(memory, self._tag(b"B", index, found))
            for (index, memory), found in zip(blocks, hashes, strict=True)
        ]

    def give_back(self, block: SealedBlock) -> None:
        """See `Seal`; nothing was taken."""

    def open_blocks(self, blocks: Sequence[tuple[int, BlockMemory, bytes]]) -> list[bool]:
        """See `Seal`; changes nothing."""
        hashes = self._hash.of([memory for _, memory, _ in blocks])
        return [
            hmac.compare_digest(self._tag(b"B", index, found), tag)
            for (index, _, tag), found in zip(blocks, hashes, strict=True)
        ]

    def close_message(self, number: int, body: bytes) -> bytes:
        """See `Seal`."""
        return body + self._tag(b"M", number, body)

    def open_message(self, number: int, data: bytes) -> bytes:
        """See `Seal`."""
        body, tag = data[:-MAC_BYTES], data[-MAC_BYTES:]
        if not hmac.compare_digest(self._tag(b"M", number, body), tag):
            raise forged_message()
        return body

    def _tag(self, kind: bytes, number: int, content: bytes) -> bytes:
        data = kind + number.to_bytes(8, "little") + content
        return hashlib.blake2b(data, key=self._key, digest_size=MAC_BYTES).digest()


def forged_message() -> TransferFailed:
    """The error that `open_message` raises."""
    return TransferFailed("a message of the hand-off is not from a worker of this fleet", field="tag")
