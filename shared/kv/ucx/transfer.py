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

from shared import failpoints
from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory
from shared.kv.fleet_key import FleetKey
from shared.kv.transfer import TRAILER_INDEX, Incoming, TransferCounters, tag
from shared.kv.ucx.address import PeerAddress, process_started, this_host
from shared.kv.ucx.incoming import LateSenders, UcxIncoming
from shared.kv.ucx.peer import Peer
from shared.kv.ucx.worker import UcxWorker

_CLOSE_TIMEOUT_S = 0.5


class UcxTransfer:
    """Implements `KVTransfer`. UCX is imported and opened by `start()`."""

    def __init__(
        self,
        host_id: bytes | None = None,
        cancel_timeout_s: float = 5.0,
        fleet_key: FleetKey | None = None,
        bind_gpu: Callable[[], None] | None = None,
    ) -> None:
        """`host_id`: 16 bytes; peers with the same id are processes that this one can watch. None: detected. With a
        `fleet_key` it sends to addresses alone that the fleet has signed.

        `bind_gpu`: where blocks are sent from a GPU's memory or received there, makes that GPU the calling thread's
        current one. `cancel_timeout_s`: how long `cancel` waits for a sender that is silent in the middle of a message.
        """
        self.counters = TransferCounters()
        self.address = b""
        self._host_id = host_id
        self._fleet_key = fleet_key
        self._cancel_timeout_s = cancel_timeout_s
        self._worker = UcxWorker(bind_gpu)
        self._late = LateSenders(self._worker)
        self._peers: dict[bytes, Peer] = {}
        self._incoming: dict[int, UcxIncoming] = {}
        self._open = False
        self._closing = asyncio.Lock()

    async def start(self) -> None:
        """See `KVTransfer`."""
        self._host_id = self._host_id or this_host()
        worker = self._worker.start()
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
        self._check_open()
        if failpoints.armed:
            await failpoints.strike_async(failpoints.UCX_SEND)
        peer, begun = self._peer(address), time.perf_counter()
        try:
            await peer.send(tag(ticket, index), memory)
        except TransferFailed:
            self.counters.num_failed_sends += index != TRAILER_INDEX
            # An endpoint that failed once stays failed; the next send gets a new one.
            if self._peers.get(address) is peer:
                self._forget(address, "another send to the peer failed")
            raise
        self.counters.sent(index, memory.nbytes, time.perf_counter() - begun)

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

    def _peer(self, address: bytes) -> Peer:
        """One peer for each address, which is as unique as the peer's incarnation."""
        peer = self._peers.get(address)
        if peer is not None and not peer.alive:
            self._forget(address, "the peer is gone")
            peer = None
        if peer is None:
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
