"""One message under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from shared.errors import TransferFailed


class Request:
    """A UCXX request, the memory that it reads or writes, and who waits for its end.

    UCXX ends a request by its Python future, on the event loop. That future is never awaited nor touched, so that
    nothing but UCX can end it; what we give up earlier (`fail`) keeps its memory until UCX is done with it.

    Dropping the UCXX object of an open request would cancel it, and in UCXX 0.52 that locks up for good when the
    progress thread is just ending the same request (each holds the lock that the other one needs). So the object
    stays until the end.
    """

    __slots__ = ("_memory", "_on_end", "_ucx", "_waiters", "done", "error", "num_bytes", "open")

    def __init__(self, ucx: Any, memory: memoryview, on_end: Callable[[Request], None]) -> None:
        """`on_end` is called once, when the request is `done`."""
        self.num_bytes = memory.nbytes
        self.open = True
        """UCX may still read or write the memory."""
        self.done = False
        """It ended, or was given up by `fail`."""
        self.error: str | None = None
        """Why it failed, once it is done; None where it succeeded."""
        self._ucx: Any = ucx
        self._memory: memoryview | None = memory
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
        """Done, as far as its waiters are concerned."""
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
