"""One source's part of a fetch, and its messages, read ahead: its failure is noticed while its blocks are awaited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from shared.block_service.client import BlockClient, SentBlock
from shared.errors import TandemError
from shared.kv.transfer import Incoming
from shared.tasks import end_task


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A store node or a peer."""

    name: str
    """The node's, or the peer's host:port."""
    client: BlockClient
    is_peer: bool


@dataclass(slots=True, eq=False)
class SourceFetch:
    """The blocks that one source brings, in the order of the chain."""

    source: Source
    key: str
    """Name of the whole fetch in commands to the engine."""
    hashes: tuple[bytes, ...]
    """Hashes of all blocks that the engine was asked to prepare for."""
    blocks: list[tuple[int, int]]
    """(place in `hashes`, block id)."""
    unsafe: Incoming | None = None
    """Where a silent sender may still write to the blocks, the receives that it may end."""
    names: list[bytes] = field(init=False)
    """Hashes of `blocks`."""

    def __post_init__(self) -> None:
        self.names = [self.hashes[place] for place, _ in self.blocks]


T = TypeVar("T")


class FetchStream:
    """An asynchronous context manager around the parts of one fetch; leaving it ends the fetch."""

    def __init__(self, parts: AsyncGenerator[list[SentBlock], None], silence_s: float) -> None:
        """`silence_s`: the longest wait for anything."""
        self._parts = parts
        self._silence_s = silence_s
        self._read: asyncio.Queue[list[SentBlock] | None] = asyncio.Queue()
        self._reading: asyncio.Task[None]

    async def __aenter__(self) -> FetchStream:
        self._reading = asyncio.create_task(self._read_all())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(TandemError):  # already raised to the caller that waited
            await end_task(self._reading)

    async def next(self) -> list[SentBlock] | None:
        """The next part, None at the end. Raises what ended the stream before that, and TimeoutError."""
        return await self.unless_broken(self._read.get())

    async def unless_broken(self, waiting: Awaitable[T]) -> T:
        """The result of `waiting`. Raises the stream's error if that comes first, and TimeoutError."""
        task = asyncio.ensure_future(waiting)
        try:
            async with asyncio.timeout(self._silence_s):
                await asyncio.wait({task, self._reading}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    self._reading.result()
                return await task
        finally:
            task.cancel()

    async def _read_all(self) -> None:
        async with contextlib.aclosing(self._parts):
            async for part in self._parts:
                self._read.put_nowait(part)
        self._read.put_nowait(None)
