"""A steady batch of answers, and concurrent long prompts, one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

from loadtest.bench.long_prompt.noisy_neighbour import NoisyNeighbour
from loadtest.bench.long_prompt.windows import Pair, Window
from loadtest.clients.base import Call, Client, RequestFailed
from loadtest.records import Reply
from loadtest.workloads.tokens import Span, TokenSource
from shared.errors import DeadlineExceeded, Internal

_START_S = 180.0
_POLL_S = 0.01
_SETTLE_S = 0.5
"""Pause after a batch starts and after a window's last long prompt: their work must not reach the next window."""


class _Kind(Enum):
    """The kind of a window."""

    QUIET = auto()
    NEIGHBOUR = auto()
    BUSY = auto()


@dataclass(frozen=True, slots=True)
class Shape:
    """The offered load."""

    num_answers: int = 8
    """Number of answers that stream all the time."""
    num_prompt_tokens: int = 64
    """Prompt tokens of each answer."""
    num_long_tokens: int = 1024
    """Tokens of a long prompt. It asks for one token only: more would measure a larger batch, not an arrival."""
    max_answer_tokens: int = 4000
    window_s: float = 6.0


@dataclass(slots=True)
class Load:
    """One system's client. `pair` measures once; calls must not overlap."""

    client: Client
    shape: Shape
    tokens: TokenSource
    _numbers: count[int] = field(default_factory=count)

    async def pair(self, *, busy_first: bool, neighbour: NoisyNeighbour | None = None) -> Pair:
        """Windows of all kinds in one batch of answers, then again in reverse order: answers grow, so a kind that was
        always last would look slow. Raises Internal if an answer ended too soon, DeadlineExceeded if none started."""
        async with self._batch() as replies:
            ttfts_s: list[float] = []
            windows: list[tuple[_Kind, Window]] = []
            kinds = [_Kind.QUIET, *([_Kind.NEIGHBOUR] if neighbour is not None else []), _Kind.BUSY]
            if busy_first:
                kinds.reverse()
            for kind in (*kinds, *reversed(kinds)):
                begin_s = time.perf_counter()
                end_s = begin_s + self.shape.window_s / 2
                if kind is _Kind.BUSY:
                    ttfts_s += await self._long_prompts(end_s)
                else:
                    with neighbour.busy() if neighbour is not None and kind is _Kind.NEIGHBOUR else nullcontext():
                        await asyncio.sleep(end_s - begin_s)
                windows.append((kind, Window(begin_s, time.perf_counter())))
                await asyncio.sleep(_SETTLE_S)
        gaps_s: dict[_Kind, list[float]] = {}
        for kind, window in windows:
            gaps_s.setdefault(kind, []).extend(window.gaps_s(replies))
        return Pair.of(gaps_s[_Kind.QUIET], gaps_s[_Kind.BUSY], ttfts_s, gaps_s.get(_Kind.NEIGHBOUR))

    async def _long_prompts(self, until_s: float) -> list[float]:
        """Sends long prompts one after the other, none after `until_s`; returns their TTFTs, seconds."""
        ttfts_s = []
        while time.perf_counter() < until_s:
            reply = await self._ask(self.shape.num_long_tokens, 1)
            assert reply.sent_s is not None
            ttfts_s.append(reply.token_times_s[0] - reply.sent_s)
        return ttfts_s

    @asynccontextmanager
    async def _batch(self) -> AsyncIterator[list[Reply]]:
        """A context in which all answers are streaming; they are cancelled at its end."""
        replies = [Reply() for _ in range(self.shape.num_answers)]
        answers = [
            asyncio.create_task(self._ask(self.shape.num_prompt_tokens, self.shape.max_answer_tokens, reply))
            for reply in replies
        ]
        try:
            try:
                async with asyncio.timeout(_START_S):
                    while not all(len(reply.token_times_s) > 1 for reply in replies):
                        await asyncio.sleep(_POLL_S)
                        _check(answers)
            except TimeoutError as error:
                raise DeadlineExceeded(f"the answers had not started after {_START_S:g} s") from error
            await asyncio.sleep(_SETTLE_S)
            yield replies
            _check(answers)
        finally:
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

    async def _ask(self, num_prompt_tokens: int, max_tokens: int, reply: Reply | None = None) -> Reply:
        number = next(self._numbers)
        name = f"lp-{self.tokens.seed}-{number}"
        prompt = self.tokens.span(Span(name, num_prompt_tokens))
        reply = reply if reply is not None else Reply()
        await self.client.generate(self.client.encode(Call(name, prompt, max_tokens)), reply)
        return reply


def _check(answers: list[asyncio.Task[Reply]]) -> None:
    for answer in answers:
        if answer.done():
            error = answer.exception()
            if isinstance(error, RequestFailed):
                raise Internal(f"an answer failed: {error.failure.message}") from error
            raise Internal("an answer ended before the window did: the batch must not change") from error
