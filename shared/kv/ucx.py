"""The transfer plane over UCX, by UCXX, the maintained successor of ucx-py.

A progress thread moves the data while the event loop and the engine do other things; a second thread wakes the event
loop when requests are done. Both belong to one `UcxTransfer`.

Error handling of endpoints: UCX can use shared memory and CMA only with it off, so endpoints within a host have it
off and rely on the session for liveness; endpoints between hosts have it on.

UCXX offers no cancel of a single receive. A message that we send to ourselves does it: it matches the receive, which
is then done. Where the true message was there first, ours finds no receive and is swept up later.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.errors import TransferFailed
from shared.kv.transfer import INDEX_BITS, TRAILER_INDEX, Incoming, TransferCounters, tag

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<B16s")
_ADDRESS_VERSION = 1
_NOTIFY_PERIOD_NS = 100_000_000
_SWEEP_DELAY_S = 1.0
_TICKET_MASK = ((1 << 64) - 1) ^ ((1 << INDEX_BITS) - 1)


def _host_id() -> bytes:
    """16 bytes that are equal for processes that can share memory: same boot, same IPC and PID namespaces."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text()]
    parts += [os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "pid")]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).digest()


class _Incoming:
    """Requests of one hand-off by block index; implements `Incoming`."""

    def __init__(self, requests: dict[int, Any], trailer: bytearray, counters: TransferCounters) -> None:
        self.requests = requests
        self._trailer = trailer
        self._counters = counters

    async def trailer(self) -> bytes:
        await _finished(self.requests[TRAILER_INDEX])
        return bytes(self._trailer)

    async def blocks(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            request = self.requests.get(index)
            if request is None:
                raise TransferFailed(f"the sender names block {index}, which nobody asked for")
            await _finished(request)
            self._counters.blocks_received += 1
            self._counters.bytes_received += request.num_bytes


class _Request:
    """A UCXX request, its memory kept alive, and a future for its end that can be failed from here."""

    def __init__(self, request: Any, memory: memoryview | bytearray, num_bytes: int) -> None:
        self.memory = memory
        self.num_bytes = num_bytes
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._wait(request))

    async def _wait(self, request: Any) -> None:
        try:
            await request.wait()
        except Exception as error:
            self.fail(TransferFailed(f"UCX: {type(error).__name__}: {error}"))
        else:
            if not self.done.done():
                self.done.set_result(None)

    def fail(self, error: TransferFailed) -> None:
        """Ends the waiting for it; what UCX does with the request no longer matters."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # it may have no waiter
        self._task.cancel()


async def _finished(request: _Request) -> None:
    """Waits without taking the request along when the waiter is cancelled."""
    await asyncio.shield(request.done)


class UcxTransfer:
    """Implements `KVTransfer`. Nothing of UCX is imported or opened before `start()`."""

    def __init__(self) -> None:
        self.counters = TransferCounters()
        self.address = b""
        self._api: Any = None
        self._context: Any = None
        self._worker: Any = None
        self._host = b""
        self._endpoints: dict[bytes, Any] = {}
        self._sends: dict[bytes, set[_Request]] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._swept: set[int] = set()
        self._notifier: threading.Thread | None = None
        self._stopping = threading.Event()
        self._closed = False

    async def start(self) -> None:
        """See `KVTransfer`."""
        # UCX otherwise warns of every environment variable it does not know.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        try:
            from ucxx._lib import libucxx
            from ucxx._lib.arr import Array
        except ImportError as error:
            raise TransferFailed(f"UCXX is not installed: {error}") from error
        self._api = libucxx
        self._array = Array
        self._context = libucxx.UCXContext({})
        self._worker = libucxx.UCXWorker(
            self._context, enable_delayed_submission=False, enable_python_future=True
        )
        self._worker.start_progress_thread(polling_mode=False, epoll_timeout=1)
        loop = asyncio.get_running_loop()
        self._notifier = threading.Thread(target=self._notify, args=(loop,), name="ucx-notifier", daemon=True)
        self._notifier.start()
        self._host = _host_id()
        address = self._worker.address
        self.address = _HEADER.pack(_ADDRESS_VERSION, self._host) + address.tobytes()

    def expect(self, ticket: int, buffers: Sequence[tuple[int, memoryview]], trailer_bytes: int) -> Incoming:
        """See `KVTransfer`."""
        self._check_open()
        assert ticket not in self._incoming, "a ticket names one hand-off"
        requests: dict[int, _Request] = {}
        for index, memory in buffers:
            assert index < TRAILER_INDEX, f"block index {index}"
            requests[index] = self._receive(ticket, index, memory)
        trailer = bytearray(trailer_bytes)
        requests[TRAILER_INDEX] = self._receive(ticket, TRAILER_INDEX, memoryview(trailer))
        incoming = _Incoming(requests, trailer, self.counters)
        self._incoming[ticket] = incoming
        return incoming

    async def send(self, address: bytes, ticket: int, index: int, memory: memoryview) -> None:
        """See `KVTransfer`."""
        self._check_open()
        request = self._send(address, ticket, index, memory)
        under_way = self._sends.setdefault(address, set())
        under_way.add(request)
        try:
            await _finished(request)
        finally:
            under_way.discard(request)
        if index != TRAILER_INDEX:
            self.counters.blocks_sent += 1
            self.counters.bytes_sent += memory.nbytes

    async def cancel(self, ticket: int) -> None:
        """See `KVTransfer`."""
        incoming = self._incoming.pop(ticket, None)
        if incoming is None:
            return
        pending = [
            (index, request) for index, request in incoming.requests.items() if not request.done.done()
        ]
        if pending:
            nothing = [self._send(self.address, ticket, index, memoryview(b"\0")) for index, _ in pending]
            for request in (*nothing, *(request for _, request in pending)):
                await asyncio.wait((request.done,))
            self._sweep_later(ticket)

    def drop_peer(self, address: bytes) -> None:
        """See `KVTransfer`."""
        self._endpoints.pop(address, None)
        for request in self._sends.pop(address, ()):
            request.fail(TransferFailed("the peer is gone"))

    async def close(self) -> None:
        """See `KVTransfer`."""
        if self._closed:
            return
        self._closed = True
        for address in list(self._sends):
            self.drop_peer(address)
        for incoming in self._incoming.values():
            for request in incoming.requests.values():
                request.fail(TransferFailed("the transfer plane is closed"))
        self._incoming.clear()
        self._endpoints.clear()
        if self._notifier is not None:
            self._stopping.set()
            await asyncio.to_thread(self._notifier.join)
            await asyncio.to_thread(self._worker.stop_progress_thread)

    # --- inside

    def _check_open(self) -> None:
        if self._worker is None or self._closed:
            raise TransferFailed("the transfer plane is not open")

    def _receive(self, ticket: int, index: int, memory: memoryview) -> _Request:
        request = self._worker.tag_recv(self._array(memory), self._api.UCXXTag(tag(ticket, index)))
        return _Request(request, memory, memory.nbytes)

    def _send(self, address: bytes, ticket: int, index: int, memory: memoryview) -> _Request:
        endpoint = self._endpoint(address)
        try:
            request = endpoint.tag_send(self._array(memory), self._api.UCXXTag(tag(ticket, index)))
        except Exception as error:
            self.drop_peer(address)
            raise TransferFailed(f"UCX: {type(error).__name__}: {error}") from error
        return _Request(request, memory, memory.nbytes)

    def _endpoint(self, address: bytes) -> Any:
        """One endpoint a peer process: an address is as unique as its incarnation."""
        endpoint = self._endpoints.get(address)
        if endpoint is not None:
            return endpoint
        if len(address) <= _HEADER.size or address[0] != _ADDRESS_VERSION:
            raise TransferFailed("the peer's transfer address is not one of ours")
        _, host = _HEADER.unpack_from(address)
        try:
            endpoint = self._api.UCXEndpoint.create_from_worker_address(
                self._worker,
                self._api.UCXAddress.create_from_buffer(address[_HEADER.size :]),
                host != self._host,
            )
        except Exception as error:
            raise TransferFailed(f"no UCX endpoint: {type(error).__name__}: {error}") from error
        self._endpoints[address] = endpoint
        return endpoint

    def _sweep_later(self, ticket: int) -> None:
        """Late messages of a cancelled ticket are taken in and thrown away, so that they fill no queue."""
        self._swept.add(ticket)

        def sweep() -> None:
            self._swept.discard(ticket)
            if not self._closed:
                self._sweep(ticket)

        asyncio.get_running_loop().call_later(_SWEEP_DELAY_S, sweep)
        self._sweep(ticket)

    def _sweep(self, ticket: int) -> None:
        wanted = self._api.UCXXTag(tag(ticket, 0))
        mask = self._api.UCXXTagMask(_TICKET_MASK)
        while (found := self._worker.tag_probe(wanted, tag_mask=mask, remove=True)).matched:
            scratch = bytearray(found.length)
            request = self._worker.tag_recv_with_handle(self._array(memoryview(scratch)), found)
            _Request(request, scratch, found.length)

    def _notify(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread that turns finished requests into futures of the event loop."""
        asyncio.set_event_loop(loop)  # UCXX makes its futures here, for the loop of the calling thread
        worker = self._worker
        ready = self._api.PythonRequestNotifierWaitState.Ready
        while not self._stopping.is_set():
            worker.populate_python_futures_pool()
            if worker.wait_request_notifier(period_ns=_NOTIFY_PERIOD_NS) == ready:
                loop.call_soon_threadsafe(worker.run_request_notifier)
        worker.clear_python_futures_pool()
