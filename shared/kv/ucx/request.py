"""One message in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from shared.errors import TransferFailed
from shared.kv.block_memory import BlockMemory


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
