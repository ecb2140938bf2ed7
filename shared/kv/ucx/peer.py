"""A process to which this one sends, and the detection of its death."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory
from shared.kv.ucx.address import PeerAddress, process_started
from shared.kv.ucx.request import Request
from shared.kv.ucx.worker import UcxWorker


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

    async def send(self, tag: int, memory: BlockMemory) -> None:
        """Returns when the memory may be reused. Raises TransferFailed."""
        request = self._worker.send(self._endpoint, tag, memory, self._sends.discard)
        self._sends.add(request)
        await request.wait()

    def drop(self, reason: str) -> None:
        """Fails the sends in flight; idempotent."""
        if self._watch is not None:
            self._watch.close()
        for request in list(self._sends):
            request.fail(reason)
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            self._worker.disconnect(endpoint)


class ProcessWatch:
    """Calls back on the event loop when a process ends, by a pidfd (Linux 5.3; elsewhere it does nothing)."""

    def __init__(self, pid: int, started: int, on_end: Callable[[], None]) -> None:
        """`started` as in `PeerAddress`: a later process with the same pid is not meant."""
        self._pid = pid
        self._started = started
        self._on_end = on_end
        self._pidfd: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Raises ProcessLookupError if the process has already ended."""
        try:
            pidfd = os.pidfd_open(self._pid)
        except ProcessLookupError:
            raise
        except (OSError, AttributeError):  # no pidfd in this kernel or sandbox
            return
        try:
            if process_started(self._pid) != self._started:
                raise ProcessLookupError(f"process {self._pid} is a later one")
        except ProcessLookupError:
            os.close(pidfd)
            raise
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._ended)

    def close(self) -> None:
        """Ends the watch; idempotent."""
        if self._pidfd is not None and self._loop is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _ended(self) -> None:
        self.close()
        self._on_end()
