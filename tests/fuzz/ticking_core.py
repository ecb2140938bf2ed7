"""A core that answers at a steady pace, so that a gap in a stream is the edge's doing alone."""

from __future__ import annotations

import asyncio
import time

from services.router.dispatch.record import RequestRecord
from services.router.dispatch.request import FinishReason, Request, TokenDelta, TokenLogprobs

STEADY = "steady"
"""Requests whose id begins so get one token a tick; the others are answered at once."""
TICK_S = 0.005


class TickingRequest:
    """One answer of `max_tokens` tokens, all the letter a."""

    def __init__(self, request: Request, token_id: int, tick_s: float) -> None:
        self._token_id = token_id
        top = ((token_id, -0.5),) * (request.sampling.logprobs or 0)
        self._logprobs = () if request.sampling.logprobs is None else (TokenLogprobs(-0.5, top),)
        self._num_left = request.sampling.max_tokens or 1
        self._tick_s = tick_s
        self._due_at = time.perf_counter() + tick_s

    @property
    def ended(self) -> bool:
        return self._num_left == 0

    def take(self) -> TokenDelta | None:
        if self._num_left == 0 or time.perf_counter() < self._due_at:
            return None
        self._due_at += self._tick_s
        self._num_left -= 1
        return TokenDelta((self._token_id,), self._logprobs, FinishReason.LENGTH if self._num_left == 0 else None)

    def notify(self, reader: asyncio.Future[None]) -> None:
        def wake() -> None:
            if not reader.done():
                reader.set_result(None)

        asyncio.get_running_loop().call_later(max(0.0, self._due_at - time.perf_counter()), wake)

    async def aclose(self) -> None:
        self._num_left = 0


class TickingCore:
    """Serves any number of requests; `context_len` tokens fit in all."""

    def __init__(self, token_id: int, context_len: int) -> None:
        self._token_id = token_id
        self._context_len = context_len
        self.num_requests = 0

    def submit(self, request: Request, record: RequestRecord) -> TickingRequest:
        self.num_requests += 1
        return TickingRequest(request, self._token_id, TICK_S if request.request_id.startswith(STEADY) else 0.0)

    def max_prompt_tokens(self) -> int:
        return self._context_len

    def not_ready_reason(self) -> str:
        return ""
