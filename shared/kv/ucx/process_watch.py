"""Notices the end of another process of this host."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from shared.kv.ucx.peer_address import process_started


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
