"""Running answers of one system, in windows with and without long prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from statistics import median

from loadtest.clients.base import Call, Client, RequestFailed
from loadtest.records import Reply
from loadtest.rig.measure import percentile
from loadtest.workloads.tokens import Span, TokenSource
from shared.errors import DeadlineExceeded, Internal

_ANSWER_PROMPT, _ANSWER = 64, 4000
"""Tokens of each answer's prompt, and most of an answer. A long prompt asks for one token only: more would measure a
larger batch, not an arrival."""
_START_S = 180.0
_POLL_S = 0.01
_SETTLE_S = 0.5
"""Pause after a batch starts and after a window's last long prompt: their work must not reach the next window."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Measurements without and with long prompts in one batch of answers. Milliseconds."""

    quiet_p50_ms: float
    quiet_p99_ms: float
    busy_p50_ms: float
    busy_p99_ms: float
    num_prompts: int
    """Long prompts that were answered."""
    prompt_ttft_ms: float
    """Median time to first token of the long prompts."""

    @property
    def p99_ratio(self) -> float:
        """p99 with long prompts over without: 1.1 is 10 % more."""
        return self.busy_p99_ms / self.quiet_p99_ms

    @property
    def p50_ratio(self) -> float:
        """Median ITL with long prompts over the median without."""
        return self.busy_p50_ms / self.quiet_p50_ms

    @staticmethod
    def of(quiet_s: Sequence[float], busy_s: Sequence[float], prompt_ttfts_s: Sequence[float]) -> Pair:
        """Made from the gaps of the windows; each needs at least one, and there must be a long prompt."""
        assert quiet_s, "no tokens arrived"
        assert busy_s, "no tokens arrived"
        return Pair(
            quiet_p50_ms=1e3 * percentile(quiet_s, 50),
            quiet_p99_ms=1e3 * percentile(quiet_s, 99),
            busy_p50_ms=1e3 * percentile(busy_s, 50),
            busy_p99_ms=1e3 * percentile(busy_s, 99),
            num_prompts=len(prompt_ttfts_s),
            prompt_ttft_ms=1e3 * median(prompt_ttfts_s),
        )


def gaps_within(begin_s: float, end_s: float, replies: Iterable[Reply]) -> list[float]:
    """The gaps between messages with tokens, over all answers, that begin and end in this window. Seconds."""
    gaps = []
    for reply in replies:
        times = [at_s for at_s in reply.token_times_s if begin_s <= at_s <= end_s]
        gaps += [later - earlier for earlier, later in pairwise(times)]
    return gaps


@dataclass(slots=True)
class Load:
    """One system's client. `pair` measures once; calls must not overlap."""

    client: Client
    num_answers: int
    """Number of answers that stream all the time."""
    num_long_tokens: int
    """Tokens of a long prompt."""
    window_s: float
    tokens: TokenSource
    _numbers: count[int] = field(default_factory=count)

    async def pair(self, *, busy_first: bool) -> Pair:
        """Windows of both kinds in one batch of answers, then again in reverse order: answers grow, so a kind that was
        always last would look slow. Raises Internal if an answer ended too soon, DeadlineExceeded if none started."""
        ttfts_s: list[float] = []
        gaps_s: dict[bool, list[float]] = {False: [], True: []}
        async with self._batch() as replies:
            windows = []
            for is_busy in (busy_first, not busy_first, not busy_first, busy_first):
                begin_s = time.perf_counter()
                if is_busy:
                    ttfts_s += await self._long_prompts(begin_s + self.window_s / 2)
                else:
                    await asyncio.sleep(self.window_s / 2)
                windows.append((is_busy, begin_s, time.perf_counter()))
                await asyncio.sleep(_SETTLE_S)
        for is_busy, begin_s, end_s in windows:
            gaps_s[is_busy] += gaps_within(begin_s, end_s, replies)
        return Pair.of(gaps_s[False], gaps_s[True], ttfts_s)

    async def _long_prompts(self, until_s: float) -> list[float]:
        """Sends long prompts one after the other, none after `until_s`; returns their TTFTs, seconds."""
        ttfts_s = []
        while time.perf_counter() < until_s:
            reply = await self._ask(self.num_long_tokens, 1, Reply())
            assert reply.sent_s is not None
            ttfts_s.append(reply.token_times_s[0] - reply.sent_s)
        return ttfts_s

    @asynccontextmanager
    async def _batch(self) -> AsyncIterator[list[Reply]]:
        """A context in which all answers are streaming; they are cancelled at its end."""
        replies = [Reply() for _ in range(self.num_answers)]
        answers = [asyncio.create_task(self._ask(_ANSWER_PROMPT, _ANSWER, reply)) for reply in replies]
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

    async def _ask(self, num_prompt_tokens: int, max_tokens: int, reply: Reply) -> Reply:
        name = f"lp-{self.tokens.seed}-{next(self._numbers)}"
        prompt = self.tokens.span(Span(name, num_prompt_tokens))
        await self.client.generate(self.client.encode(Call(name, prompt, max_tokens)), reply)
        return reply


def _check(answers: list[asyncio.Task[Reply]]) -> None:
    for answer in answers:
        if answer.done():
            error = answer.exception()
            if isinstance(error, RequestFailed):
                raise Internal(f"an answer failed: {error.failure.message}") from error
            raise Internal("an answer ended before the window did: the batch must not change") from error
