"""One hand-off as its receiver sees it: receives posted into pool memory, notes with the blocks, then the trailer.

A sender may be lost before it has sent everything. Then another one serves the same reservation, under a ticket of its
own and with the missing blocks alone: a block counts as here once its checksum was found right in this memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory
from shared.kv.fleet_key import FleetKey, HandoffSeal
from shared.kv.handoff.arrival_check import Announced, ArrivalCheck
from shared.kv.handoff.receiving import end_receives
from shared.kv.handoff.trailer import decode_trailer, trailer_bytes
from shared.kv.transfer import Incoming, KVTransfer, new_ticket
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.tasks import end_task


class SenderLeft(Enum):
    """Why a sender brought no more."""

    ABORTED = "aborted"
    """It gave up, and said so by its trailer."""
    FAILED = "failed"
    """A receive failed, as when its process ends in the middle of a message."""
    REPLACED = "replaced"
    """`replace_sender` was called."""


@dataclass(frozen=True, slots=True)
class ReceivedHandoff:
    """A hand-off that ended as it should: every needed block is in place, though some may be damaged."""

    first_token: int
    finished: bool
    """The first token ended the request."""


@dataclass(slots=True, eq=False)
class HandoffReceiver:
    """The blocks of one reservation as they arrive, from one sender after another. For one event loop."""

    transfer: KVTransfer
    check: ArrivalCheck
    buffers: Mapping[int, BlockMemory]
    """Where each needed block arrives, by block index."""
    num_tokens: int
    """That the sender must have computed."""
    fleet_key: FleetKey | None = None
    """With one, notes, blocks and trailer must carry the tags of their ticket's seal."""
    checksums: dict[int, int] = field(default_factory=dict)
    """Of the blocks that are here, undamaged, by index: nothing writes to them any more."""
    damaged: set[int] = field(default_factory=set)
    """Blocks that arrived with another checksum than they left with."""
    num_damaged: int = 0
    """Over all senders."""
    left: SenderLeft | None = None
    """Whether the present sender brings no more, and why."""
    _ticket: int = 0
    _needed: frozenset[int] = frozenset()
    _incoming: Incoming | None = None
    _failure: TransferFailed | None = None
    _seal: HandoffSeal | None = None
    _num_messages: int = 0
    _announced: dict[int, Announced] = field(default_factory=dict)
    _replaced: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def missing(self) -> list[int]:
        """Indexes of the blocks that a next sender has to send, damaged ones included."""
        return [index for index in self.buffers if index not in self.checksums]

    def open(self) -> tuple[int, list[int]]:
        """Posts receives for a new sender, into the missing blocks alone; returns its ticket and their indexes."""
        needed = self.missing
        self.damaged.clear()
        self._announced.clear()
        self._replaced.clear()
        self.left = self._failure = None
        self._needed = frozenset(needed)
        self._ticket = new_ticket()
        memory = [(index, self.buffers[index]) for index in needed]
        self._num_messages = 0
        if self.fleet_key is not None:
            self._seal = self.fleet_key.seal(self._ticket, self.check.block_bytes)
        size = trailer_bytes(len(needed), sealed=self._seal is not None)
        self._incoming = self.transfer.expect(self._ticket, memory, size)
        return self._ticket, needed

    @property
    def is_replaced(self) -> bool:
        """`replace_sender` was called, and no new sender is awaited yet."""
        return self._replaced.is_set()

    def replace_sender(self) -> None:
        """The sender is lost: `receive` ends, with what is here by then."""
        self._replaced.set()

    async def receive(self, timeout_s: float) -> ReceivedHandoff | SenderLeft:
        """Takes what the present sender sends, and ends with it.

        However this ends, also by an exception or a cancel of the task, no receive of its ticket can write to the
        memory any more when it does, unless it raises MemoryLost. Raises TransferFailed.
        """
        assert self._incoming is not None, "open() comes first"
        try:
            async with asyncio.timeout(timeout_s):
                trailer = await self._until_replaced(self._incoming)
        except TimeoutError as error:
            raise TransferFailed(f"the hand-off did not end within {timeout_s:g} s", limit=timeout_s) from error
        finally:
            await end_receives(self.transfer, self._ticket)
        await self._confirm([index for index in self._announced if self._incoming.arrived(index)])
        if trailer is None or trailer.aborted:
            missed = SenderLeft.REPLACED if self._failure is None else SenderLeft.FAILED
            self.left = missed if trailer is None else SenderLeft.ABORTED
            return self.left
        lacking = self._needed - self._announced.keys()
        if lacking or trailer.num_computed_tokens != self.num_tokens:
            raise TransferFailed(
                f"the hand-off ended with {len(lacking)} of {len(self._needed)} blocks missing and "
                f"{trailer.num_computed_tokens} of {self.num_tokens} tokens computed"
            )
        return ReceivedHandoff(trailer.first_token, trailer.finished)

    async def replaced(self, timeout_s: float) -> None:
        """Waits for `replace_sender` where the sender has left. Raises TransferFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._replaced.wait()
        except TimeoutError as error:
            raise self._failure or TransferFailed("the sender gave up, and no other one came") from error

    async def closed(self) -> None:
        """After MemoryLost: returns when the silent sender cannot write any more (see `Incoming.closed`)."""
        assert self._incoming is not None, "open() comes first"
        await self._incoming.closed()

    async def _until_replaced(self, incoming: Incoming) -> types_pb2.HandoffTrailer | None:
        """The trailer; None where the sender is replaced, or a receive failed, before it came."""
        taking = asyncio.create_task(self._take(incoming))
        replaced = asyncio.create_task(self._replaced.wait())
        try:
            await asyncio.wait((taking, replaced), return_when=asyncio.FIRST_COMPLETED)
            return taking.result() if taking.done() else None
        finally:
            await end_task(replaced)
            await end_task(taking)

    async def _take(self, incoming: Incoming) -> types_pb2.HandoffTrailer | None:
        """Notes and their blocks, until the trailer and its blocks are here; None where a receive fails."""
        while True:
            try:
                data = await incoming.trailer()
            except TransferFailed as error:
                self._failure = error
                return None
            trailer = decode_trailer(data, self._seal, self._num_messages)
            self._num_messages += 1
            indexes = self._take_checksums(trailer)
            if trailer.more:
                incoming.expect_another_trailer()
            elif trailer.aborted:
                return trailer
            try:
                await incoming.blocks(indexes)
            except TransferFailed as error:
                self._failure = error
                return None
            await self._confirm(indexes)
            if not trailer.more:
                return trailer

    def _take_checksums(self, trailer: types_pb2.HandoffTrailer) -> list[int]:
        """What a note or trailer says of blocks; returns all indexes that it names. Raises TransferFailed."""
        tags = trailer.block_tags or [b""] * len(trailer.block_indexes)
        for index, checksum, tag in zip(trailer.block_indexes, trailer.checksums, tags, strict=True):
            if index not in self._needed:
                raise TransferFailed(f"the sender names block {index}, which was not expected")
            if self._announced.setdefault(index, Announced(checksum, tag)).checksum != checksum:
                raise TransferFailed(f"the sender gives block {index} two checksums")
        return list(trailer.block_indexes)

    async def _confirm(self, indexes: Sequence[int]) -> None:
        """Checks blocks that have arrived and were not checked before."""
        new = [index for index in indexes if index not in self.checksums and index not in self.damaged]
        arrived = [(index, self.buffers[index], self._announced[index]) for index in new]
        for index, sound in zip(new, await self.check.sound(arrived, self._seal), strict=True):
            if sound:
                self.checksums[index] = self._announced[index].checksum
            else:
                self.damaged.add(index)
                self.num_damaged += 1
