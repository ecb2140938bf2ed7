"""The event loop's side of the pool: a copy of what it holds, and the engine's BlockExchange, whose commands have one
answer each."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from shared.engine.messages import (
    AdoptBlocks,
    BlocksAdopted,
    BlocksHeld,
    CacheFlushed,
    CloseSession,
    Command,
    ExpectSession,
    FetchPrepared,
    FlushCache,
    HoldBlocks,
    PrepareFetch,
)


class LocalBlocks:
    """The hashes of the pool's findable blocks."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._hashes

    def on_pool(self, sealed: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """Applies a change of the pool's contents."""
        self._hashes.difference_update(evicted)
        self._hashes.update(sealed)


ExchangeEvent = BlocksHeld | FetchPrepared | BlocksAdopted | CacheFlushed


class BlockExchangeClient:
    """Pairs commands with the engine's answers: by key, in order where one key has several."""

    def __init__(self, submit: Callable[[Command], None]) -> None:
        """`submit`: the engine's, or that of any that has its place."""
        self._submit_to_engine = submit
        self._keys = itertools.count(1)
        self._waiting: dict[str, deque[Callable[[ExchangeEvent], None]]] = {}

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

    def adopt(
        self, key: str, checksums: dict[int, int], num_damaged: int, on_adopted: Callable[[BlocksAdopted], None]
    ) -> None:
        """Blocks of a prepared fetch have arrived, and others that count as damaged. `on_adopted` is called with the
        answer before any later event of the engine is handled: a first token that follows is counted with them."""

        def answered(answer: ExchangeEvent) -> None:
            assert isinstance(answer, BlocksAdopted)
            on_adopted(answer)

        self._submit(key, AdoptBlocks(key, checksums, num_damaged), answered)

    async def flush(self) -> int:
        """Forgets all cached blocks; returns how many there were."""
        key = self._key()
        answer = await self._ask(key, FlushCache(key))
        assert isinstance(answer, CacheFlushed)
        return answer.num_blocks

    async def close_session(self, session: str) -> int:
        """Retains nothing for its sake any more; returns the number of blocks that this frees."""
        key = self._key()
        answer = await self._ask(key, CloseSession(key, session))
        assert isinstance(answer, CacheFlushed)
        return answer.num_blocks

    def expect_session(self, session: str, next_turn_s: float) -> None:
        """Expects a session's next turn in `next_turn_s` seconds."""
        self._submit_to_engine(ExpectSession(session, next_turn_s))

    def on_event(self, event: ExchangeEvent) -> None:
        """The engine's answer."""
        asked = self._waiting[event.key]
        answer = asked.popleft()
        if not asked:
            del self._waiting[event.key]
        answer(event)

    def _key(self) -> str:
        return f"blocks/{next(self._keys)}"

    async def _ask(self, key: str, command: HoldBlocks | PrepareFetch | FlushCache | CloseSession) -> ExchangeEvent:
        asked: asyncio.Future[ExchangeEvent] = asyncio.get_running_loop().create_future()

        def answered(answer: ExchangeEvent) -> None:
            if not asked.done():  # else its caller was cancelled
                asked.set_result(answer)

        self._submit(key, command, answered)
        return await asked

    def _submit(
        self,
        key: str,
        command: HoldBlocks | PrepareFetch | AdoptBlocks | FlushCache | CloseSession,
        on_answer: Callable[[ExchangeEvent], None],
    ) -> None:
        self._waiting.setdefault(key, deque()).append(on_answer)
        self._submit_to_engine(command)
