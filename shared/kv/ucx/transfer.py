"""`KVTransfer` over UCX.

A receive whose message has begun to arrive cannot be cancelled. It ends as follows:

- Sender that dies: its connection breaks, or the read of its memory fails, and UCX fails the receive.
- Sender on the same host that lives: UCX reads its memory from here (CMA), so the receive ends by itself.
- Sender on another host, or without CMA, that lives but is silent (stopped, cut off from the network, or it dropped
  this peer with an unexpected message in flight): the receive does not end. `cancel` waits for `cancel_timeout_s` and
  then raises TransferFailed; the memory must be considered lost until the receive has ended after all
  (`Incoming.closed`): the sender continues, or is killed and its connection breaks, or the transfer is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shared import failpoints
from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory
from shared.kv.fleet_key import FleetKey
from shared.kv.transfer import INDEX_BITS, TRAILER_INDEX, Incoming, TransferCounters, tag
from shared.kv.ucx.peer_address import PeerAddress, process_started, this_host
from shared.kv.ucx.process_watch import ProcessWatch
from shared.kv.ucx.worker import FULL_MASK, Request, UcxWorker

_TICKET_MASK = FULL_MASK ^ ((1 << INDEX_BITS) - 1)
_LATE_S = 300.0
_MAX_LATE_TICKETS = 256
_SCRATCH_BYTES = 8
_CLOSE_TIMEOUT_S = 0.5


class Peer:
    """An endpoint, the sends in flight on it, and the detection of the peer's death.

    UCX reports the peer's death where its connection breaks; within a host a pidfd does too, which needs no connection.
    """

    def __init__(self, worker: UcxWorker, address: PeerAddress, same_host: bool, on_death: Callable[[], None]) -> None:
        """`on_death` is called at most once; it should call `drop`."""
        self._worker = worker
        self._address = address
        self._watch = ProcessWatch(address.pid, address.started, on_death) if same_host else None
        self._endpoint: Any = None
        self._sends: set[Request] = set()

    @property
    def alive(self) -> bool:
        """False once UCX has detected the peer's death."""
        return self._endpoint is not None and bool(self._endpoint.alive)

    def connect(self) -> None:
        """Raises TransferFailed if the peer is known to be dead."""
        if self._watch is not None:
            try:
                self._watch.start()
            except ProcessLookupError as error:
                raise TransferFailed("the peer's process has ended") from error
        try:
            self._endpoint = self._worker.connect(self._address.worker)
        except TransferFailed:
            self.drop("no endpoint")
            raise

    def send(self, tag: int, memory: BlockMemory, on_end: Callable[[Request], None]) -> None:
        """Posts a send; `on_end` is called on the loop when the memory may be reused. Raises TransferFailed."""

        def ended(request: Request) -> None:
            self._sends.discard(request)
            on_end(request)

        self._sends.add(self._worker.send(self._endpoint, tag, memory, ended))

    def drop(self, reason: str) -> None:
        """Fails the sends in flight; idempotent."""
        if self._watch is not None:
            self._watch.close()
        for request in list(self._sends):
            request.fail(reason)
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            self._worker.disconnect(endpoint)


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


class UcxTransfer:
    """Implements `KVTransfer`. UCX is imported and opened by `start()`."""

    def __init__(
        self,
        host_id: bytes | None = None,
        cancel_timeout_s: float = 5.0,
        fleet_key: FleetKey | None = None,
        bind_gpu: Callable[[], None] | None = None,
        *,
        needs_gpu: bool = True,
    ) -> None:
        """`host_id`: 16 bytes; peers with the same id are processes that this one can watch. None: detected. With a
        `fleet_key` it sends to addresses alone that the fleet has signed.

        `bind_gpu`: where blocks are sent from a GPU's memory or received there, makes that GPU the calling thread's
        current one; `needs_gpu`: a UCX that cannot is refused. `cancel_timeout_s`: how long `cancel` waits for a sender
        that is silent in the middle of a message.
        """
        self.counters = TransferCounters()
        self.address = b""
        self.takes_gpu_memory = False
        self._host_id = host_id
        self._fleet_key = fleet_key
        self._cancel_timeout_s = cancel_timeout_s
        self._worker = UcxWorker(bind_gpu, needs_gpu=needs_gpu)
        self._late = LateSenders(self._worker)
        self._peers: dict[bytes, Peer] = {}
        self._incoming: dict[int, UcxIncoming] = {}
        self._open = False
        self._closing = asyncio.Lock()

    async def start(self) -> None:
        """See `KVTransfer`."""
        self._host_id = self._host_id or this_host()
        worker = self._worker.start()
        self.takes_gpu_memory = self._worker.takes_gpu_memory
        self.address = PeerAddress(self._host_id, os.getpid(), process_started(os.getpid()), worker).encode(
            self._fleet_key
        )
        self._open = True

    def expect(self, ticket: int, buffers: Sequence[tuple[int, BlockMemory]], trailer_bytes: int) -> Incoming:
        """See `KVTransfer`."""
        self._check_open()
        assert ticket not in self._incoming, "a ticket names one hand-off"
        incoming = self._incoming[ticket] = UcxIncoming(self._worker, ticket, self.counters)
        incoming.post(buffers, trailer_bytes)
        return incoming

    async def send(self, address: bytes, ticket: int, index: int, memory: BlockMemory) -> None:
        """See `KVTransfer`."""
        await self.send_blocks(address, ticket, [(index, memory)], lambda: None)

    async def send_blocks(
        self, address: bytes, ticket: int, blocks: Sequence[tuple[int, BlockMemory]], on_taken: Callable[[], None]
    ) -> None:
        """See `KVTransfer`."""
        self._check_open()
        try:
            peer, begun = self._peer(address), time.perf_counter()
        except TransferFailed:
            self._count_unsent(blocks)
            raise
        all_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        num_left = len(blocks)
        failed: Exception | None = None

        def ended(index: int, request: Request) -> None:
            nonlocal num_left, failed
            num_left -= 1
            if request.error is None:
                self.counters.sent(index, request.num_bytes, time.perf_counter() - begun)
                on_taken()
            else:
                failed = failed or TransferFailed(request.error)
                self.counters.num_failed_sends += index != TRAILER_INDEX
            if not num_left and not all_ended.done():
                all_ended.set_result(None)

        for place, (index, memory) in enumerate(blocks):
            try:
                if failpoints.armed:
                    await failpoints.strike_async(failpoints.UCX_SEND)
                peer.send(tag(ticket, index), memory, partial(ended, index))
            except (TransferFailed, failpoints.Injected) as error:  # those before are on their way
                failed = failed or error
                self._count_unsent(blocks[place:])
                num_left -= len(blocks) - place
                break
        if num_left:
            await all_ended
        if failed is not None:
            # An endpoint that failed once stays failed; the next send gets a new one.
            if self._peers.get(address) is peer:
                self._forget(address, "another send to the peer failed")
            raise failed

    async def cancel(self, ticket: int) -> None:
        """See `KVTransfer`. Raises TransferFailed with `details["memory_lost"]` if a sender fell silent in the
        middle of a message."""
        incoming = self._incoming.get(ticket)
        if incoming is None:
            return
        try:
            if incoming.cancel("the hand-off was cancelled"):
                self._late.add(ticket)
                self._worker.deliver()
                async with asyncio.timeout(self._cancel_timeout_s):
                    await incoming.closed()
        except TimeoutError as error:
            raise TransferFailed(
                f"{incoming.num_open} blocks may still be written after {self._cancel_timeout_s:g} s: "
                "their memory must not be used again",
                limit=self._cancel_timeout_s,
                memory_lost=True,
            ) from error
        finally:
            self._incoming.pop(ticket, None)

    def drop_peer(self, address: bytes) -> None:
        """See `KVTransfer`."""
        self._forget(address, "the peer is gone")

    async def close(self) -> None:
        """See `KVTransfer`."""
        async with self._closing:
            if not self._open:
                return
            self._open = False
            reason = "the transfer plane is closed"
            for address in list(self._peers):
                self._forget(address, reason)
            pending = [incoming for incoming in self._incoming.values() if incoming.cancel(reason)]
            self._incoming.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._late.close()
                    for incoming in pending:
                        await incoming.closed()
            await self._worker.close()

    # --- inside

    def _check_open(self) -> None:
        if not self._open:
            raise TransferFailed("the transfer plane is not open")

    def _count_unsent(self, blocks: Sequence[tuple[int, BlockMemory]]) -> None:
        self.counters.num_failed_sends += sum(index != TRAILER_INDEX for index, _ in blocks)

    def _peer(self, address: bytes) -> Peer:
        """One peer for each address, which is as unique as the peer's incarnation."""
        peer = self._peers.get(address)
        if peer is not None and not peer.alive:
            self._forget(address, "the peer is gone")
            peer = None
        if peer is None:
            # A restarted process has another address, so endpoints to addresses that ended are closed here or never.
            for other in [other for other, known in self._peers.items() if not known.alive]:
                self._forget(other, "the peer is gone")
            place = PeerAddress.decode(address, self._fleet_key)
            peer = Peer(self._worker, place, place.host == self._host_id, lambda: self.drop_peer(address))
            peer.connect()
            self._peers[address] = peer
            self.counters.num_endpoints = len(self._peers)
        return peer

    def _forget(self, address: bytes, reason: str) -> None:
        peer = self._peers.pop(address, None)
        self.counters.num_endpoints = len(self._peers)
        if peer is not None:
            peer.drop(reason)
