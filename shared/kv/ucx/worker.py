"""The one UCX worker of a process's transfer plane, and its two threads.

UCXX's progress thread moves the data while the event loop and the engine do other things. It is native code; progress
driven from Python moved data 2.5 times slower. A second thread waits for ended requests and wakes the loop.

TCP connections whose other side has fallen silent are ended. UCX probes idle connections alone, and only from the side
that opened them. Otherwise a cut in the network shows after a quarter of an hour of retransmissions, or never, and
until then a receive whose message has begun keeps its memory. UCX has no setting for that, so its sockets get options
of Linux (tcp(7)). Those that it accepts inherit them from the socket that listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, TransferFailed
from shared.kv.block_memory import BlockMemory

SILENT_S = 6
"""A connection whose other host acknowledges nothing for this long ends. A process that is stopped does not count,
since the kernel answers for it. Long enough that a stalled hand-off is found first, for that names the pair that is
cut; short enough for `cancel`, which waits for receives that have begun."""
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
)
FULL_MASK = (1 << 64) - 1
_WAKE_PERIOD_S = 0.0005
_LOOK_AT_REST_MS = 100
"""The progress thread looks for work this often where nothing wakes it. Sends, receives and connections do, so it is a
reserve; each look costs some 20 µs, all the time."""
_LOOK_MS = 1
"""The same with transports of a GPU: whether all of them wake the thread was not measured."""
_DRAIN_TIMEOUT_S = 0.2
_CLOSE_PERIOD_NS = 10_000_000
_CLOSE_ATTEMPTS = 3
_ENVIRONMENT = {
    # UCX's log goes to stdout by default, which our processes use for JSON events.
    "UCX_LOG_FILE": "stderr",
    # UCXX sets a variable for CUDA machines; elsewhere UCX warns that it is unused.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # Lets endpoints with error handling read the memory of a process of this host (CMA). By default UCX does not, for
    # a sender that gives up a message cannot keep its receiver from reading on. Here checksums find such blocks.
    "UCX_CMA_MEMORY_INVALIDATE": "y",
    # By default UCX waits in connect(2), and holds the lock that every send takes: a peer behind a cut network would
    # stop this process for two minutes.
    "UCX_TCP_CONN_NB": "y",
}
"""Read by UCX when it is opened; what the user has set stays."""


class Request:
    """A UCXX request, the memory that it reads or writes, and the waiters for its end.

    UCXX ends a request through its Python future, on the event loop. That future is never awaited nor changed here, so
    that only UCX can end it. A request abandoned earlier (`fail`) keeps its memory until UCX has finished with it.

    Dropping the UCXX object of an open request would cancel it. In UCXX 0.52 that deadlocks if the progress thread is
    just ending the same request (each holds the lock that the other one needs). So the object stays until the end.
    """

    __slots__ = ("_memory", "_on_end", "_ucx", "_waiters", "done", "error", "num_bytes", "open")

    def __init__(self, ucx: Any, memory: BlockMemory, on_end: Callable[[Request], None]) -> None:
        """`on_end` is called once, when the request is `done`."""
        self.num_bytes = memory.nbytes
        self.open = True
        """UCX may still read or write the memory."""
        self.done = False
        """Whether it ended or was abandoned by `fail`."""
        self.error: str | None = None
        """Why it failed, once it is done; None if it succeeded."""
        self._ucx: Any = ucx
        self._memory: BlockMemory | None = memory
        self._on_end: Callable[[Request], None] | None = on_end
        self._waiters: list[asyncio.Future[None]] = []
        ucx.future.add_done_callback(self._ended)

    async def wait(self) -> None:
        """Returns when it has succeeded; a cancelled waiter changes nothing. Raises TransferFailed."""
        while not self.done:
            await self._change()
        if self.error is not None:
            raise TransferFailed(self.error)

    async def closed(self) -> None:
        """Returns when UCX no longer touches the memory."""
        while self.open:
            await self._change()

    def fail(self, reason: str) -> None:
        """Ends it for its waiters with this error; UCX may still use the memory."""
        if not self.done:
            self._finish(reason)

    def _change(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def _ended(self, future: asyncio.Future[Any]) -> None:
        error = future.exception()
        self.open = False
        self._ucx = self._memory = None
        if self.done:
            self._wake()
        else:
            self._finish(None if error is None else f"UCX: {type(error).__name__}: {error}")

    def _finish(self, error: str | None) -> None:
        self.error = error
        self.done = True
        self._wake()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


@contextmanager
def ending_silent_connections() -> Iterator[None]:
    """The TCP sockets that this process opens within end after SILENT_S without an answer, as do all connections that
    they accept."""
    before = _sockets()
    yield
    for inode, number in _sockets().items():
        if inode not in before:
            _limit_silence(number)


def _sockets() -> dict[int, int]:
    """Descriptors of this process's sockets, by inode."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            state = entry.stat()
        except OSError:  # it was closed meanwhile
            continue
        if stat.S_ISSOCK(state.st_mode):
            found[state.st_ino] = int(entry.name)
    return found


def _limit_silence(number: int) -> None:
    try:
        with socket.socket(fileno=os.dup(number)) as opened:
            if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type is socket.SOCK_STREAM:
                for level, name, value in _OPTIONS:
                    opened.setsockopt(level, name, value)
    except OSError:  # it was closed meanwhile
        return


class UcxWorker:
    """Posts messages. UCX is imported and opened by `start()`.

    Endpoints to other processes handle errors, within a host too. Without that, two processes know each other's
    endpoints and requests by their addresses in memory, and a message of a dead peer may name one that is freed; and a
    copy out of a dead peer's memory ends the process that copies. It also keeps UCX from its shared memory queues
    (posix, sysv): a sender that dies or is stopped while it writes to the queue of a receiver blocks it for everyone.
    So messages travel by TCP, and the data of long ones by CMA.
    """

    def __init__(self, bind_gpu: Callable[[], None] | None = None, *, needs_gpu: bool = True) -> None:
        """`bind_gpu` makes a GPU the calling thread's current one; None = blocks lie in host memory. `needs_gpu`: a UCX
        without CUDA transports is refused, not used for blocks in host memory."""
        self._bind_gpu = bind_gpu
        self._needs_gpu = needs_gpu
        self.takes_gpu_memory = False
        self._api: Any = None
        self._array: Any = None
        self._context: Any = None
        self._worker: Any = None
        self._loopback: Any = None
        self._notifier: threading.Thread | None = None
        self._notifying = False

    def start(self) -> bytes:
        """Opens it for the running event loop and returns its address. Raises TransferFailed, and ConfigError for
        a GPU's blocks where UCX cannot take them."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from ucxx._lib import libucxx
            from ucxx._lib.arr import Array
        except ImportError as error:
            raise TransferFailed(f"UCXX is not installed: {error}") from error
        self._api = libucxx
        self._array = Array
        try:
            with ending_silent_connections():
                self._context = libucxx.UCXContext({})
                worker = libucxx.UCXWorker(self._context, enable_delayed_submission=True, enable_python_future=True)
            if self._bind_gpu is not None and self._takes_gpu():
                self.takes_gpu_memory = True
                worker.set_progress_thread_start_callback(self._bind_gpu)
            worker.start_progress_thread(
                polling_mode=False, epoll_timeout=_LOOK_MS if self.takes_gpu_memory else _LOOK_AT_REST_MS
            )
            address: bytes = worker.address.tobytes()
        except ConfigError:
            raise
        except Exception as error:
            raise TransferFailed(f"UCX cannot be opened: {type(error).__name__}: {error}") from error
        self._worker = worker
        self._loopback = self.connect(address, error_handling=False)
        self._notifier = threading.Thread(
            target=self._notify,
            args=(worker, asyncio.get_running_loop(), libucxx.PythonRequestNotifierWaitState.Ready),
            name="ucx-notifier",
            daemon=True,
        )
        self._notifier.start()
        return address

    async def close(self) -> None:
        """Ends the threads and frees the worker. All endpoints must be closed; idempotent.

        A send that its peer never took stays within UCX until the process ends, and so do the worker's memory and a
        sleeping thread of UCX: UCX has no way to end it.
        """
        if self._worker is None or self._notifier is None:
            return
        worker = self._worker
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                for request in self._drain(worker):
                    await request.closed()
        self.disconnect(self._loopback)
        worker.stop_request_notifier_thread()
        self._notifier.join()
        worker.stop_progress_thread()
        self._drain(worker)
        worker.run_request_notifier()
        # Asked again, the notifier forgets that it was stopped, and would warn about that.
        while worker.wait_request_notifier(period_ns=1) != self._api.PythonRequestNotifierWaitState.Timeout:
            pass
        worker.stop_request_notifier_thread()
        worker.clear_python_futures_pool()
        self._worker = self._context = self._loopback = self._notifier = None
        await asyncio.sleep(0)  # lets the last requests call back

    def receive(
        self, tag: int, memory: BlockMemory, on_end: Callable[[Request], None], mask: int = FULL_MASK
    ) -> Request:
        """Posts a receive for the next message whose tag equals `tag` in the bits of `mask`."""
        self._worker.populate_python_futures_pool()
        ucx = self._worker.tag_recv(self._array(memory), self._api.UCXXTag(tag), tag_mask=self._api.UCXXTagMask(mask))
        return Request(ucx, memory, on_end)

    def send(self, endpoint: Any, tag: int, memory: BlockMemory, on_end: Callable[[Request], None]) -> Request:
        """Posts a send. Raises TransferFailed."""
        self._worker.populate_python_futures_pool()
        try:
            ucx = endpoint.tag_send(self._array(memory), self._api.UCXXTag(tag))
        except Exception as error:
            raise TransferFailed(f"UCX: {type(error).__name__}: {error}") from error
        return Request(ucx, memory, on_end)

    def end_receive(self, tag: int) -> None:
        """Ends a receive for `tag` that has no message yet; if it has one, an empty message is left over.

        An empty message to ourselves matches the receive, and changes no memory. Cancelling is not an option: see
        `Request`.
        """
        self.send(self._loopback, tag, memoryview(b""), lambda _: None)

    def connect(self, address: bytes, error_handling: bool = True) -> Any:
        """An endpoint to the worker at a UCX worker address. Raises TransferFailed."""
        try:
            with ending_silent_connections():
                return self._api.UCXEndpoint.create_from_worker_address(
                    self._worker, self._api.UCXAddress.create_from_buffer(address), error_handling
                )
        except Exception as error:
            raise TransferFailed(f"no UCX endpoint: {type(error).__name__}: {error}") from error

    def disconnect(self, endpoint: Any) -> None:
        """Closes an endpoint, and with error handling ends its sends. Takes a millisecond."""
        endpoint.close_blocking(_CLOSE_PERIOD_NS, _CLOSE_ATTEMPTS)

    def deliver(self) -> None:
        """Reports finished requests at once, sooner than the notifier thread would."""
        self._notifying = False
        if self._worker is not None:
            self._worker.run_request_notifier()

    def _takes_gpu(self) -> bool:
        has_cuda = bool(self._context.cuda_support)
        if not has_cuda and self._needs_gpu:
            raise ConfigError(
                "gpu_direct needs a UCX with CUDA transports: this one has none, or UCX_TLS leaves them out",
                field="gpu_direct",
            )
        return has_cuda

    def _drain(self, worker: Any) -> list[Request]:
        """Takes unexpected messages, a few bytes of each.

        UCXX would receive them whole before it frees the worker, and wait for ever if their sender is dead.
        """
        taken: list[Request] = []
        anything, mask = self._api.UCXXTag(0), self._api.UCXXTagMask(0)
        while (found := worker.tag_probe(anything, tag_mask=mask, remove=True)).matched:
            worker.populate_python_futures_pool()
            scratch = memoryview(bytearray(8))
            ucx = worker.tag_recv_with_handle(self._array(scratch), found)
            taken.append(Request(ucx, scratch, lambda _: None))
        return taken

    def _notify(self, worker: Any, loop: asyncio.AbstractEventLoop, ready: Any) -> None:
        last_s = 0.0
        while worker.wait_request_notifier() == ready:
            # Requests end in bursts; waking the loop for each would cost more than moving a small block.
            time.sleep(max(last_s + _WAKE_PERIOD_S - time.monotonic(), 0.0))
            last_s = time.monotonic()
            # `deliver` clears the flag before it reads: requests that ended before are delivered by that call.
            if not self._notifying:
                self._notifying = True
                loop.call_soon_threadsafe(self.deliver)
