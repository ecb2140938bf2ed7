"""The transfer plane: it moves KV blocks from one worker's pool into another's.

Two-sided: the receiver posts a receive straight into pool memory for every block it expects, the sender sends straight
from its own pool. A message's tag is the hand-off's ticket and the block's index. A ticket is drawn at random; knowing
it is the right to write.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.kv.block_memory import BlockMemory

TICKET_BITS = 48
INDEX_BITS = 16
TRAILER_INDEX = (1 << INDEX_BITS) - 1
"""The index of the trailer; blocks have lower indexes."""


def new_ticket() -> int:
    """48 random bits."""
    return secrets.randbits(TICKET_BITS)


def tag(ticket: int, index: int) -> int:
    """The 64-bit tag of one message."""
    assert 0 <= ticket < 1 << TICKET_BITS, f"ticket {ticket:#x} has more than {TICKET_BITS} bits"
    assert 0 <= index <= TRAILER_INDEX, f"block index {index} has more than {INDEX_BITS} bits"
    return ticket << INDEX_BITS | index


@dataclass(slots=True)
class TransferCounters:
    """Sums since start, and the endpoints that are open. Blocks, a message each, are counted apart from notes and
    trailers, which say what the blocks are."""

    blocks_sent: int = 0
    bytes_sent: int = 0
    notes_sent: int = 0  # and trailers
    note_bytes_sent: int = 0
    blocks_received: int = 0
    bytes_received: int = 0  # of the memory that they have here
    send_s: float = 0.0  # seconds from a block's start to its end, over all blocks; many are on their way at once
    num_failed_sends: int = 0
    blocks_packed: int = 0  # of the blocks sent
    bytes_saved: int = 0  # by which they were smaller
    num_endpoints: int = 0  # open now

    def sent(self, index: int, num_bytes: int, seconds: float = 0.0) -> None:
        """Counts a message that has gone: a block, or at TRAILER_INDEX a note or trailer."""
        if index == TRAILER_INDEX:
            self.notes_sent += 1
            self.note_bytes_sent += num_bytes
            return
        self.blocks_sent += 1
        self.bytes_sent += num_bytes
        self.send_s += seconds


class Incoming(Protocol):
    """The receives of one hand-off."""

    async def trailer(self) -> bytes:
        """The trailer, once it has arrived; it may overtake blocks. Raises TransferFailed."""
        ...

    def expect_another_trailer(self) -> None:
        """Posts a receive for one more trailer, which `trailer` returns from now on. The one before must have come.
        Raises TransferFailed after `cancel`."""
        ...

    async def blocks(self, indexes: Sequence[int]) -> None:
        """Returns when the blocks with these indexes are in their memory. Raises TransferFailed."""
        ...

    def arrived(self, index: int) -> bool:
        """Whether the block is in its memory; also after `cancel`, which changes nothing about it."""
        ...

    async def closed(self) -> None:
        """Returns when no receive can write any more: for a `cancel` that could not wait for that. Comes once a silent
        sender has gone on, or is known to be dead, or at the transfer's `close`; only after `cancel`."""
        ...


class KVTransfer(Protocol):
    """One worker's access to the transfer plane. All methods are for one event loop; none blocks it.

    Memory given to `expect` and `send` stays the caller's: until the calls named below return, it must stay allocated
    and must not be used for anything else.
    """

    counters: TransferCounters
    address: bytes
    """Opaque address for peers to send to. Set by `start`."""
    takes_gpu_memory: bool
    """Whether blocks may lie in the memory of this process's GPU. Set by `start`."""

    async def start(self) -> None:
        """Opens the plane. Raises TransferFailed if it is not available on this machine."""
        ...

    def expect(self, ticket: int, buffers: Sequence[tuple[int, BlockMemory]], trailer_bytes: int) -> Incoming:
        """Posts a receive for each (block index, memory) and one for a trailer of exactly `trailer_bytes`.

        Until `cancel(ticket)` returns, a sender that knows the ticket may write to the memory.
        """
        ...

    async def send(self, address: bytes, ticket: int, index: int, memory: BlockMemory) -> None:
        """Sends one block (or, at TRAILER_INDEX, a trailer); returns when the memory may be reused.

        Waits as long as the receiver lives and has not taken the message. Raises TransferFailed when the peer is
        dropped or unreachable. Must not be cancelled: then it would be unknown whether the memory is still read.
        """
        ...

    async def send_blocks(
        self, address: bytes, ticket: int, blocks: Sequence[tuple[int, BlockMemory]], on_taken: Callable[[], None]
    ) -> None:
        """Sends several blocks, (block index, memory) each, in one call, which takes less time than a `send` for each.
        `on_taken` is called as each was taken. Returns, or raises TransferFailed, when the memory of all may be reused.
        """
        ...

    async def cancel(self, ticket: int) -> None:
        """Ends a hand-off. When this returns, no receive of the ticket can write any more; `cancel` itself writes
        nothing. Required after every `expect`; unknown tickets are ignored; later messages count as taken.

        A receive whose message has begun to arrive cannot be cancelled and is awaited. Raises TransferFailed with
        `details["memory_lost"]` if its sender is alive but makes no progress: the ticket's memory may then be written
        until `Incoming.closed` returns, and must not be used for anything else before.
        """
        ...

    def drop_peer(self, address: bytes) -> None:
        """The process at that address is gone: sends to it fail now, its endpoint is forgotten."""
        ...

    async def close(self) -> None:
        """Ends everything; sends and receives under way raise TransferFailed. Idempotent."""
        ...
