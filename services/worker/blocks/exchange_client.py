"""The event loop's side of the engine's BlockExchange: commands about blocks, each with one answer."""

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

ExchangeEvent = BlocksHeld | FetchPrepared | BlocksAdopted | CacheFlushed


class BlockExchangeClient:
    """Pairs commands with the engine's answers: by key, in order where one key has several."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._keys = itertools.count(1)
        self._waiting: dict[str, deque[asyncio.Future[ExchangeEvent]]] = {}

    async def hold(self, hashes: tuple[bytes, ...]) -> BlocksHeld:
        """Holds those of the blocks that the pool has, for a sender. Await it to its end: they must be released."""
        key = self._key()
        answer = await self._ask(key, HoldBlocks(key, hashes))
        assert isinstance(answer, BlocksHeld)
        return answer

    async def prepare(self, hashes: tuple[bytes, ...], room_to_compute: bool) -> FetchPrepared:
        """Takes blocks for what is missing of a chain. Await it to its end: `EndFetch` must follow."""
        key = self._key()
        answer = await self._ask(key, PrepareFetch(key, hashes, room_to_compute))
        assert isinstance(answer, FetchPrepared)
        return answer

    def adopt(self, key: str, checksums: dict[int, int], num_damaged: int) -> asyncio.Future[ExchangeEvent]:
        """Blocks of a prepared fetch have arrived, and others that count as damaged; the answer is a `BlocksAdopted`,
        which need not be awaited."""
        return self._ask(key, AdoptBlocks(key, checksums, num_damaged))

    async def flush(self) -> int:
        """Forgets all cached blocks; returns how many there were."""
        key = self._key()
        answer = await self._ask(key, FlushCache(key))
        assert isinstance(answer, CacheFlushed)
        return answer.num_blocks

    def on_event(self, event: ExchangeEvent) -> None:
        """The engine's answer."""
        asked = self._waiting[event.key]
        answer = asked.popleft()
        if not answer.done():  # else its caller was cancelled
            answer.set_result(event)
        if not asked:
            del self._waiting[event.key]

    def _key(self) -> str:
        return f"blocks/{next(self._keys)}"

    def _ask(
        self, key: str, command: HoldBlocks | PrepareFetch | AdoptBlocks | FlushCache
    ) -> asyncio.Future[ExchangeEvent]:
        answer: asyncio.Future[ExchangeEvent] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(answer)
        self._engine.submit(command)
        return answer
