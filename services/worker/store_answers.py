"""Questions of the event loop to the engine about blocks, each with one answer."""

from __future__ import annotations

import asyncio
import itertools

from shared.engine.engine import Engine
from shared.engine.messages import BlocksHeld, FetchPrepared, HoldBlocks, PrepareFetch


class StoreAnswers:
    """Pairs what was asked with what the engine says, by key."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._keys = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[BlocksHeld | FetchPrepared]] = {}

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

    def on_event(self, event: BlocksHeld | FetchPrepared) -> None:
        """The engine's answer."""
        self._waiting.pop(event.key).set_result(event)

    def _key(self) -> str:
        return f"store/{next(self._keys)}"

    async def _ask(self, key: str, command: HoldBlocks | PrepareFetch) -> BlocksHeld | FetchPrepared:
        answer: asyncio.Future[BlocksHeld | FetchPrepared] = asyncio.get_running_loop().create_future()
        self._waiting[key] = answer
        self._engine.submit(command)
        return await answer
