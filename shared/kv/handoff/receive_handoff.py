"""One hand-off as its receiver sees it: receives posted into pool memory, notes with the blocks, then the trailer.

A sender may be lost before it has sent everything. Then another one serves the same reservation, under a ticket of its
own and with the missing blocks alone: a block counts as here once its checksum was found right in this memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory, beside_loop
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.arrival_check import Announced, ArrivalCheck, announcements
from shared.kv.handoff.shipment import decode_trailer, trailer_bytes
from shared.kv.seal import Purpose, Seal
from shared.kv.transfer import Incoming, KVTransfer, new_ticket
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.tasks import end_task, unbroken


class MemoryLost(TransferFailed):
    """A silent sender may still write to the blocks: they must not be used again before `Incoming.closed` returns."""


class LostMemory:
    """Memory that silent senders may still write to, until they cannot; then it is given back. For one event loop."""

    def __init__(self) -> None:
        self._kept: set[asyncio.Task[None]] = set()

    def keep(self, closed: Coroutine[None, None, None], give_back: Callable[[], None]) -> None:
        """After MemoryLost. `closed` returns when the sender cannot write any more, as `Incoming.closed` does, also at
        the transfer's `close`. Then `give_back` is called, once."""

        async def wait() -> None:
            await closed
            give_back()

        task = asyncio.create_task(wait())
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    @property
    def num_kept(self) -> int:
        """Number of kept blocks that have not been given back yet."""
        return len(self._kept)


async def receive_trailer(
    transfer: KVTransfer, ticket: int, incoming: Incoming, timeout_s: float, seal: Seal | None = None
) -> types_pb2.HandoffTrailer:
    """Waits for the trailer and for every block it names, which a `seal` has not opened yet.

    However this ends, also by an exception or a cancel of the task, no receive of the ticket can write to its memory
    any more when it does, unless it raises MemoryLost. Raises TransferFailed.
    """
    try:
        async with asyncio.timeout(timeout_s):
            trailer = decode_trailer(await incoming.trailer(), seal)
            await incoming.blocks(list(trailer.block_indexes))
        return trailer
    except TimeoutError as error:
        raise TransferFailed(f"the hand-off did not end within {timeout_s:g} s", limit=timeout_s) from error
    finally:
        await end_receives(transfer, ticket)


async def end_receives(transfer: KVTransfer, ticket: int) -> None:
    """When this ends, also by a cancel of the task, no receive of the ticket can write any more.

    Raises MemoryLost where that is impossible, also in place of a cancel: the memory's owner needs it.
    """
    ending, cancelled = asyncio.ensure_future(transfer.cancel(ticket)), None
    while not ending.done():
        try:
            await asyncio.wait((ending,))
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        ending.result()
    except TransferFailed as error:
        raise MemoryLost(error.message) from error
    if cancelled is not None:
        raise cancelled


class SenderLeft(Enum):
    """Why a sender brought no more."""

    ABORTED = "aborted"
    """The sender gave up, and sent a trailer for it."""
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
    """Tokens that the sender must have computed."""
    fleet_key: FleetKey | None = None
    """With one, notes, blocks and trailer must be sealed for their ticket."""
    store: Callable[[Sequence[int]], None] | None = None
    """Moves blocks, by index, out of their buffers, in a thread, as soon as each was found undamaged."""
    checksums: dict[int, int] = field(default_factory=dict)
    """Checksums of the blocks that are here, undamaged, by index: nothing writes to them any more."""
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
    _seal: Seal | None = None
    _num_messages: int = 0
    _has_trailer: bool = False
    _announced: dict[int, Announced] = field(default_factory=dict)
    _replaced: asyncio.Event = field(default_factory=asyncio.Event)
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _limit: asyncio.Timeout | None = None
    _timeout_s: float = 0.0

    @property
    def missing(self) -> list[int]:
        """Indexes of the blocks that a next sender has to send, damaged ones included."""
        return [index for index in self.buffers if index not in self.checksums]

    @property
    def num_arrived(self) -> int:
        """Messages of the present sender that have arrived: blocks, notes, the trailer; 0 before `open`."""
        if self._incoming is None:
            return 0
        return self._num_messages + sum(map(self._incoming.arrived, self._needed))

    @property
    def is_waiting(self) -> bool:
        """The present sender has still to bring something; False before `open`."""
        if self._incoming is None:
            return False
        is_complete = self._has_trailer and all(map(self._incoming.arrived, self._needed))
        return self.left is None and not is_complete

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
        self._num_messages, self._has_trailer = 0, False
        if self.fleet_key is not None:
            self._seal = self.fleet_key.seal(Purpose.HANDOFF, self._ticket, self.check.block_bytes)
        size = trailer_bytes(len(needed), self._seal, packed=self.check.packing is not None)
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
        """Takes what the present sender sends, and ends with it. It has `timeout_s` seconds for each note and for the
        trailer: how long a prompt takes is not known here.

        However this ends, also by an exception or a cancel of the task, no receive of its ticket can write to the
        memory any more when it does, unless it raises MemoryLost. Raises TransferFailed.
        """
        assert self._incoming is not None, "open() comes first"
        try:
            async with asyncio.timeout(timeout_s) as limit:
                self._limit, self._timeout_s = limit, timeout_s
                trailer = await self._until_replaced(self._incoming)
        except TimeoutError as error:
            raise TransferFailed(f"nothing of the hand-off came for {timeout_s:g} s", limit=timeout_s) from error
        finally:
            try:
                await unbroken(self._settled())
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
            replaced.cancel()
            # Also where it is cancelled once more: else `taking` would begin to check what arrives from now on.
            await unbroken(end_task(taking))

    async def _take(self, incoming: Incoming) -> types_pb2.HandoffTrailer | None:
        """Notes and their blocks, until the trailer and its blocks are here; None where a receive fails.

        Notes are read while the blocks of earlier ones arrive and are checked.
        """
        named: asyncio.Queue[list[int] | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(incoming, named))
        confirming = asyncio.create_task(self._confirm_arrivals(incoming, named))
        try:
            await asyncio.wait((reading, confirming), return_when=asyncio.FIRST_COMPLETED)
            if confirming.done() and not reading.done():
                confirming.result()
                return None
            trailer = reading.result()
            if trailer is None or trailer.aborted:
                return trailer
            await confirming
            return trailer if self._failure is None else None
        finally:
            reading.cancel()
            try:
                await end_task(confirming)
            finally:
                await end_task(reading)

    async def _read(
        self, incoming: Incoming, named: asyncio.Queue[list[int] | None]
    ) -> types_pb2.HandoffTrailer | None:
        """Notes, then the trailer, which it returns; None where its receive fails. `named` gets the indexes in each,
        behind the trailer's None."""
        while True:
            try:
                data = await incoming.trailer()
            except TransferFailed as error:
                self._failure = error
                return None
            trailer = decode_trailer(data, self._seal, self._num_messages)
            self._num_messages += 1
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
            named.put_nowait(self._take_checksums(trailer))
            if not trailer.more:
                self._has_trailer = True
                named.put_nowait(None)
                return trailer
            incoming.expect_another_trailer()

    async def _confirm_arrivals(self, incoming: Incoming, named: asyncio.Queue[list[int] | None]) -> None:
        """Blocks that were named, as they arrive; ends behind the trailer's, or where a receive fails."""
        batches = [await named.get()]
        while batches != [None]:
            while not named.empty():
                batches.append(named.get_nowait())
            indexes = [index for batch in batches for index in batch or ()]
            try:
                await incoming.blocks(indexes)
            except TransferFailed as error:
                self._failure = error
                return
            await self._confirm(indexes)
            batches = batches[-1:] if batches[-1] is None else [await named.get()]

    def _take_checksums(self, trailer: types_pb2.HandoffTrailer) -> list[int]:
        """What a note or trailer says of blocks; returns all indexes that it names. Raises TransferFailed."""
        for index, announced in announcements(trailer):
            if index not in self._needed:
                raise TransferFailed(f"the sender names block {index}, which was not expected")
            size = announced.packed_bytes
            if size and (self.check.packing is None or size % 8 or size >= self.check.block_bytes):
                raise TransferFailed(
                    f"the sender packs block {index} in {size} bytes",
                    field="packed_bytes",
                    limit=self.check.block_bytes - 8,
                )
            if self._announced.setdefault(index, announced).checksum != announced.checksum:
                raise TransferFailed(f"the sender gives block {index} two checksums")
        return list(trailer.block_indexes)

    async def _confirm(self, indexes: Sequence[int]) -> None:
        """Checks blocks that have arrived and were not checked before; to its end, since each is opened and
        unpacked in place, once."""
        async with self._checking:
            once = dict.fromkeys(indexes)  # a note and the trailer behind it name the same blocks
            new = [index for index in once if index not in self.checksums and index not in self.damaged]
            if new:
                await unbroken(self._check(new))

    async def _settled(self) -> None:
        """Returns when no check is under way, which may write to the memory."""
        async with self._checking:
            pass

    async def _check(self, new: Sequence[int]) -> None:
        arrived = [(index, self.buffers[index], self._announced[index]) for index in new]
        found = await self.check.sound(arrived, self._seal)
        if (store := self.store) is not None:
            good = [index for index, sound in zip(new, found, strict=True) if sound]
            await beside_loop(len(good) * self.check.block_bytes, lambda: store(good))
        for index, sound in zip(new, found, strict=True):
            if sound:
                self.checksums[index] = self._announced[index].checksum
            else:
                self.damaged.add(index)
                self.num_damaged += 1
