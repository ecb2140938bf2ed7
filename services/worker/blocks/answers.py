"""Questions of the event loop to the engine about blocks, each with one answer."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque

from shared.engine.engine import Engine
from shared.engine.messages import (
    AdoptBlocks,
    BlocksAdopted,
    BlocksHeld,
    CacheFlushed,
    FetchPrepared,
    FlushCache,
    HoldBlocks,
    PrepareFetch,
)

Answer = BlocksHeld | FetchPrepared | BlocksAdopted | CacheFlushed


class BlockAnswers:
    """Pairs what was asked with what the engine says: by key, and in order where a key was asked about several
    times."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._keys = itertools.count(1)
        self._waiting: dict[str, deque[asyncio.Future[Answer]]] = {}

    async def hold(self, hashes: tuple[bytes, ...]) -> BlocksHeld:
        """Those of the blocks that are here, held for a sender. To be awaited to its end: they must be released."""
        key = self._key()
        answer = await self._ask(key, HoldBlocks(key, hashes))
        assert isinstance(answer, BlocksHeld)
        return answer

    async def prepare(self, hashes: tuple[bytes, ...], room_to_compute: bool) -> FetchPrepared:
        """Blocks for what is missing of a chain. To be awaited to its end: `EndFetch` is due."""
        key = self._key()
        answer = await self._ask(key, PrepareFetch(key, hashes, room_to_compute))
        assert isinstance(answer, FetchPrepared)
        return answer

    def adopt(self, key: str, checksums: dict[int, int]) -> asyncio.Future[Answer]:
        """Blocks of a prepared fetch have arrived; the answer is a `BlocksAdopted`, which nobody has to wait for."""
        return self._ask(key, AdoptBlocks(key, checksums))

    async def flush(self) -> int:
        """Forgets all cached blocks; returns how many there were."""
        key = self._key()
        answer = await self._ask(key, FlushCache(key))
        assert isinstance(answer, CacheFlushed)
        return answer.num_blocks

    def on_event(self, event: Answer) -> None:
        """The engine's answer."""
        asked = self._waiting[event.key]
        answer = asked.popleft()
        if not answer.done():  # else nobody waits for it any more
            answer.set_result(event)
        if not asked:
            del self._waiting[event.key]

    def _key(self) -> str:
        return f"blocks/{next(self._keys)}"

    def _ask(self, key: str, command: HoldBlocks | PrepareFetch | AdoptBlocks | FlushCache) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(answer)
        self._engine.submit(command)
        return answer
