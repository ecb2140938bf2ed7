"""The receiving side: the receives of one hand-off, and late messages of cancelled hand-offs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory
from shared.kv.transfer import INDEX_BITS, TRAILER_INDEX, TransferCounters, tag
from shared.kv.ucx.request import Request
from shared.kv.ucx.worker import FULL_MASK, UcxWorker

_TICKET_MASK = FULL_MASK ^ ((1 << INDEX_BITS) - 1)
_LATE_S = 300.0
_MAX_LATE_TICKETS = 256
_SCRATCH_BYTES = 8


class UcxIncoming:
    """Implements `Incoming`."""

    def __init__(self, worker: UcxWorker, ticket: int, counters: TransferCounters) -> None:
        self._worker = worker
        self._ticket = ticket
        self._counters = counters
        self._receives: dict[int, Request] = {}
        self._trailer = bytearray()
        self._cancelled = False

    def post(self, buffers: Sequence[tuple[int, BlockMemory]], trailer_bytes: int) -> None:
        """Posts every receive."""
        for index, memory in buffers:
            assert index < TRAILER_INDEX, f"block index {index}"
            assert index not in self._receives, f"block index {index} twice"
            self._receives[index] = self._worker.receive(tag(self._ticket, index), memory, self._count)
        self._post_trailer(trailer_bytes)

    async def trailer(self) -> bytes:
        """See `Incoming`."""
        await self._receives[TRAILER_INDEX].wait()
        return bytes(self._trailer)

    def expect_another_trailer(self) -> None:
        """See `Incoming`."""
        assert self._receives[TRAILER_INDEX].done, "the trailer before has not come"
        if self._cancelled:
            raise TransferFailed("the hand-off was cancelled")
        self._post_trailer(len(self._trailer))

    def arrived(self, index: int) -> bool:
        """See `Incoming`."""
        receive = self._receives[index]
        return receive.done and receive.error is None

    async def blocks(self, indexes: Sequence[int]) -> None:
        """See `Incoming`."""
        for index in indexes:
            receive = self._receives.get(index)
            if receive is None:
                raise TransferFailed(f"the sender names block {index}, which was not expected")
            await receive.wait()

    def cancel(self, reason: str) -> bool:
        """Fails all waiters and ends the receives that have no message yet.

        Returns False if every receive has ended. Leaves empty messages for `LateSenders`; idempotent.
        """
        pending = [(index, receive) for index, receive in self._receives.items() if receive.open]
        if not self._cancelled:
            self._cancelled = True
            for index, receive in pending:
                receive.fail(reason)
                self._worker.end_receive(tag(self._ticket, index))
        return bool(pending)

    async def closed(self) -> None:
        """See `Incoming`."""
        for receive in self._receives.values():
            await receive.closed()

    @property
    def num_open(self) -> int:
        """Receives that UCX may still write to."""
        return sum(receive.open for receive in self._receives.values())

    def _post_trailer(self, num_bytes: int) -> None:
        self._trailer = bytearray(num_bytes)
        self._receives[TRAILER_INDEX] = self._worker.receive(
            tag(self._ticket, TRAILER_INDEX), memoryview(self._trailer), lambda _: None
        )

    def _count(self, receive: Request) -> None:
        if receive.error is None:
            self._counters.blocks_received += 1
            self._counters.bytes_received += receive.num_bytes


class LateSenders:
    """Lets senders finish that do not know yet that their hand-off was cancelled.

    For each ticket one receive takes late messages into a few bytes: UCX reports to the sender that its message was
    taken, and moves no data. A ticket is served for `_LATE_S`; later messages wait in UCX, like those for an unknown
    ticket, until their sender gives up.
    """

    def __init__(self, worker: UcxWorker) -> None:
        self._worker = worker
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._receives: dict[int, Request] = {}

    def add(self, ticket: int) -> None:
        """Serves a cancelled ticket; idempotent."""
        if ticket in self._timers:
            return
        if len(self._timers) >= _MAX_LATE_TICKETS:
            self.remove(next(iter(self._timers)))
        self._timers[ticket] = asyncio.get_running_loop().call_later(_LATE_S, self.remove, ticket)
        self._post(ticket)

    def remove(self, ticket: int) -> None:
        """Stops serving a ticket."""
        self._timers.pop(ticket).cancel()
        self._worker.end_receive(tag(ticket, 0))

    async def close(self) -> None:
        """Stops serving all tickets."""
        for ticket in list(self._timers):
            self.remove(ticket)
        for receive in list(self._receives.values()):
            await receive.closed()

    def _post(self, ticket: int) -> None:
        def taken(_: Request) -> None:
            if ticket in self._timers:
                self._post(ticket)
            else:
                self._receives.pop(ticket, None)

        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._receives[ticket] = self._worker.receive(tag(ticket, 0), scratch, taken, _TICKET_MASK)
