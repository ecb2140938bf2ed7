"""The transfer plane within one process, without UCX: for tests of code that uses a `KVTransfer`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory, host_bytes
from shared.kv.transfer import TRAILER_INDEX, Incoming, TransferCounters


class LocalPlane:
    """The transfers that can reach each other: those started on this plane."""

    def __init__(self) -> None:
        self._transfers: dict[bytes, LocalTransfer] = {}
        self._numbers = itertools.count()

    def join(self, transfer: LocalTransfer) -> bytes:
        """Returns the transfer's address."""
        address = b"local-%d" % next(self._numbers)
        self._transfers[address] = transfer
        return address

    def leave(self, address: bytes) -> None:
        """Makes that address unreachable."""
        self._transfers.pop(address, None)

    def at(self, address: bytes) -> LocalTransfer:
        """The transfer at an address. Raises TransferFailed if there is none."""
        transfer = self._transfers.get(address)
        if transfer is None:
            raise TransferFailed("nothing is at the peer's transfer address", field="transfer_address")
        return transfer


@dataclass(slots=True, eq=False)
class _Message:
    """A send that no receive has matched yet."""

    target: bytes
    memory: BlockMemory
    taken: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Receive:
    """A receive, ended or not; `ended` never has an exception, `error` says why it failed."""

    memory: BlockMemory
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None

    def end(self, error: str | None = None) -> None:
        if not self.ended.is_set():
            self.error = error
            self.ended.set()

    async def wait(self) -> None:
        await self.ended.wait()
        if self.error is not None:
            raise TransferFailed(self.error)


class _Incoming:
    """Implements `Incoming`."""

    def __init__(
        self, buffers: Sequence[tuple[int, BlockMemory]], trailer_bytes: int, match_trailer: Callable[[], None]
    ) -> None:
        """`match_trailer` looks for a message for a new trailer receive."""
        self._match_trailer = match_trailer
        self._cancelled = False
        self._trailer = bytearray(trailer_bytes)
        self.receives = {index: _Receive(memory) for index, memory in buffers}
        assert len(self.receives) == len(buffers), "a block index twice"
        assert TRAILER_INDEX not in self.receives, f"block index {TRAILER_INDEX}"
        self.receives[TRAILER_INDEX] = _Receive(memoryview(self._trailer))

    async def trailer(self) -> bytes:
        """See `Incoming`."""
        await self.receives[TRAILER_INDEX].wait()
        return bytes(self._trailer)

    def expect_another_trailer(self) -> None:
        """See `Incoming`."""
        assert self.receives[TRAILER_INDEX].ended.is_set(), "the trailer before has not come"
        if self._cancelled:
            raise TransferFailed("the hand-off was cancelled")
        self._trailer = bytearray(len(self._trailer))
        self.receives[TRAILER_INDEX] = _Receive(memoryview(self._trailer))
        self._match_trailer()

    def arrived(self, index: int) -> bool:
        """See `Incoming`."""
        receive = self.receives[index]
        return receive.ended.is_set() and receive.error is None

    def cancel(self, reason: str) -> None:
        """Ends the receives that have no message yet."""
        self._cancelled = True
        for receive in self.receives.values():
            receive.end(reason)

    async def blocks(self, indexes: Sequence[int]) -> None:
        """See `Incoming`."""
        for index in indexes:
            receive = self.receives.get(index)
            if receive is None:
                raise TransferFailed(f"the sender names block {index}, which was not expected")
            await receive.wait()

    async def closed(self) -> None:
        """See `Incoming`: here `cancel` never leaves a receive behind."""


class LocalTransfer:
    """Implements `KVTransfer`; a message is copied as soon as it matches its receive."""

    def __init__(self, plane: LocalPlane) -> None:
        self.counters = TransferCounters()
        self.address = b""
        self.takes_gpu_memory = False
        self._plane = plane
        self._open = False
        self._incoming: dict[int, _Incoming] = {}
        self._untaken: dict[tuple[int, int], list[_Message]] = {}
        """Messages that arrived before their receive, by ticket and block index."""
        self._cancelled: set[int] = set()
        self._sends: set[_Message] = set()

    async def start(self) -> None:
        """See `KVTransfer`."""
        self.address = self._plane.join(self)
        self._open = True

    def expect(self, ticket: int, buffers: Sequence[tuple[int, BlockMemory]], trailer_bytes: int) -> Incoming:
        """See `KVTransfer`."""
        self._check_open()
        assert ticket not in self._incoming, "a ticket names one hand-off"
        incoming = self._incoming[ticket] = _Incoming(
            buffers, trailer_bytes, lambda: self._match(ticket, TRAILER_INDEX)
        )
        for index in incoming.receives:
            self._match(ticket, index)
        return incoming

    async def send(self, address: bytes, ticket: int, index: int, memory: BlockMemory) -> None:
        """See `KVTransfer`."""
        await self.send_blocks(address, ticket, [(index, memory)], lambda: None)

    async def send_blocks(
        self, address: bytes, ticket: int, blocks: Sequence[tuple[int, BlockMemory]], on_taken: Callable[[], None]
    ) -> None:
        """See `KVTransfer`."""
        self._check_open()
        target = self._plane.at(address)
        messages = [_Message(address, memory, asyncio.get_running_loop().create_future()) for _, memory in blocks]
        self._sends.update(messages)
        for (index, _), message in zip(blocks, messages, strict=True):
            target._untaken.setdefault((ticket, index), []).append(message)
            target._match(ticket, index)
        failed: TransferFailed | None = None
        for (index, memory), message in zip(blocks, messages, strict=True):
            try:
                await message.taken
            except TransferFailed as error:
                failed = failed or error
            else:
                self.counters.sent(index, memory.nbytes)
                on_taken()
            finally:
                self._sends.discard(message)
        if failed is not None:
            raise failed

    async def cancel(self, ticket: int) -> None:
        """See `KVTransfer`."""
        self._end(ticket, "the hand-off was cancelled")

    def drop_peer(self, address: bytes) -> None:
        """See `KVTransfer`."""
        for message in self._sends:
            if message.target == address:
                _fail(message, "the peer is gone")

    async def close(self) -> None:
        """See `KVTransfer`."""
        if not self._open:
            return
        self._open = False
        self._plane.leave(self.address)
        for message in self._sends:
            _fail(message, "the transfer plane is closed")
        for ticket in list(self._incoming):
            self._end(ticket, "the transfer plane is closed")
        for message in itertools.chain.from_iterable(self._untaken.values()):
            _fail(message, "the peer is gone")
        self._untaken.clear()

    # --- inside

    def _check_open(self) -> None:
        if not self._open:
            raise TransferFailed("the transfer plane is not open")

    def _end(self, ticket: int, reason: str) -> None:
        incoming = self._incoming.pop(ticket, None)
        if incoming is None or all(receive.ended.is_set() for receive in incoming.receives.values()):
            return
        incoming.cancel(reason)
        self._cancelled.add(ticket)
        for late in [key for key in self._untaken if key[0] == ticket]:
            self._match(*late)

    def _match(self, ticket: int, index: int) -> None:
        """Matches the messages of this tag with their receive."""
        messages = self._untaken.get((ticket, index), [])
        while messages:
            if messages[0].taken.done():  # abandoned by its sender
                del messages[0]
                continue
            if ticket not in self._cancelled:
                incoming = self._incoming.get(ticket)
                receive = incoming.receives.get(index) if incoming is not None else None
                if receive is None or receive.ended.is_set():
                    return
                self._copy(messages[0].memory, receive, is_block=index != TRAILER_INDEX)
            messages.pop(0).taken.set_result(None)
        self._untaken.pop((ticket, index), None)

    def _copy(self, source: BlockMemory, receive: _Receive, *, is_block: bool) -> None:
        if source.nbytes > receive.memory.nbytes:
            receive.end(f"a message of {source.nbytes} bytes for memory of {receive.memory.nbytes}")
            return
        host_bytes(receive.memory).cast("B")[: source.nbytes] = host_bytes(source).cast("B")
        if is_block:
            self.counters.blocks_received += 1
            self.counters.bytes_received += receive.memory.nbytes
        receive.end()


def _fail(message: _Message, reason: str) -> None:
    if not message.taken.done():
        message.taken.set_exception(TransferFailed(reason))
        message.taken.exception()  # its waiter may be gone
