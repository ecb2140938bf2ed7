"""One request in the router's core: what it has produced, its timings, its deltas on the way to the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.router.admission.controller import Estimate
from services.router.dispatch.write_coalescer import WriteCoalescer
from services.router.placement.views import NO_HITS, PrefixHits
from services.router.request import (
    Request,
    RequestSummary,
    TokenDelta,
    TokenLogprobs,
)
from shared.errors import TandemError
from shared.rpc.convert import finish_reason_from_proto
from shared.rpc.pb.tandem.v1 import types_pb2

if TYPE_CHECKING:
    from services.router.dispatch.attempt import Attempt


@dataclass(slots=True)
class Timeline:
    """Moments of a request's first attempt that led to a token, time.perf_counter() seconds."""

    accepted: float
    matched: float = 0.0
    placed: float = 0.0
    reserved: float = 0.0
    first_token: float = 0.0


class ActiveRequest:
    """State of one request from submit to its last token; implements `RunningRequest` for the edge.

    The dispatcher fills it, the edge reads it; both on the event loop.
    """

    def __init__(self, request: Request, coalescer: WriteCoalescer) -> None:
        """Its reader wakes when `turns` says so."""
        self.request = request
        self.summary = RequestSummary()
        self.num_attempts = 0
        """So many were begun; each has a name of its own on the workers."""
        self.produced: list[int] = []
        """Output tokens so far: a retry continues behind them."""
        self.hits: PrefixHits = NO_HITS
        """Where its prefix lies, by the index."""
        self.estimate: Estimate | None = None
        """With what the admission queue let it in; None before."""
        self.assignment: asyncio.Future[Attempt] | None = None
        """Set while it waits for workers."""
        self.timeline = Timeline(accepted=request.arrived_at or time.perf_counter())
        self.task: asyncio.Task[None] | None = None
        self.finished = False
        self._pending: TokenDelta | None = None  # what the edge has not taken yet, as one
        self._error: TandemError | None = None
        self._settled = False
        self._coalescer = coalescer
        self._has_begun = False  # the edge was given something
        self._reader: asyncio.Future[None] | None = None  # set while the edge waits for more

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.request.prompt_token_ids, *self.produced]

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.request.num_prompt_tokens + len(self.produced)

    @property
    def wire_id(self) -> str:
        """The request's name on its workers: one an attempt, so that no late word of an earlier one counts."""
        return f"{self.request.request_id}#{self.num_attempts}"

    # --- the dispatcher's side

    def emit(self, tokens: types_pb2.SequenceTokens) -> None:
        """Passes new tokens on to the client; what a slow client has not taken yet goes in one message."""
        token_ids = tuple(tokens.token_ids)
        self.produced.extend(token_ids)
        finish = finish_reason_from_proto(tokens.finish_reason)
        self.finished = finish is not None
        logprobs = _logprobs(tokens) if tokens.logprobs else ()
        waiting = self._pending
        if waiting is None:
            self._pending = TokenDelta(token_ids, logprobs, finish)
        else:
            self._pending = TokenDelta(waiting.token_ids + token_ids, waiting.logprobs + logprobs, finish)
        if not self.finished:
            self._wake_reader()

    def settle(self) -> None:
        """Lets the last delta go: who reads it finds the workers free, the request counted and its id free again."""
        self._settled = True
        self._wake_reader()

    def fail(self, error: TandemError) -> None:
        """Ends the client's stream with an error, behind what came before."""
        self._error = error
        self._wake_reader()

    def on_first_token(self, tokens: types_pb2.SequenceTokens, now: float) -> None:
        """Notes the TTFT split; called once, for the first token of the request's life."""
        line, split = self.timeline, self.summary.ttft
        line.first_token = now
        split.placement_ms = (line.matched - line.accepted) * 1e3
        split.queue_ms = (line.placed - line.matched) * 1e3
        split.reserve_ms = (line.reserved - line.placed) * 1e3
        split.prefix_fetch_ms = tokens.prefix_fetch_ms
        split.prefill_queue_ms = tokens.prefill_queue_ms
        split.prefill_compute_ms = tokens.prefill_compute_ms
        on_worker_ms = tokens.prefix_fetch_ms + tokens.prefill_queue_ms + tokens.prefill_compute_ms
        split.return_ms = max(0.0, (now - line.reserved) * 1e3 - on_worker_ms)
        split.ttft_ms = (now - line.accepted) * 1e3
        self.summary.num_cached_tokens = tokens.num_cached_tokens
        self.summary.num_fetched_tokens = tokens.num_fetched_tokens
        self.summary.num_peer_tokens = tokens.num_peer_tokens

    def on_second_token(self, tokens: types_pb2.SequenceTokens, now: float) -> None:
        """Notes what lay between the first two tokens of a handed-off request."""
        between_ms = (now - self.timeline.first_token) * 1e3
        self.summary.ttft.first_decode_step_ms = tokens.first_decode_step_ms
        self.summary.ttft.ship_exposed_ms = max(0.0, between_ms - tokens.first_decode_step_ms)

    # --- the edge's side

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        """See `RunningRequest`."""
        while True:
            await self._turn()
            if self.finished and not self._settled:
                continue  # the end came between the reader's waking and its turn
            delta, self._pending = self._pending, None
            is_last = self._settled
            if delta is not None:
                yield delta
            if self._error is not None:
                raise self._error
            if is_last:
                return

    async def aclose(self) -> None:
        """See `RunningRequest`: cancels the dispatcher's task, which frees what the workers hold."""
        task, self.task = self.task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,))

    # --- between the two

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self._coalescer.take(reader, now=not self._has_begun)
            self._has_begun = True

    async def _turn(self) -> None:
        """Waits for something to have come, and for the turn to pass it on."""
        reader = self._reader = asyncio.get_running_loop().create_future()
        if self._settled or self._error is not None or (self._pending is not None and not self.finished):
            self._wake_reader()
        try:
            await reader
        finally:
            self._reader = None


def _logprobs(tokens: types_pb2.SequenceTokens) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(item.logprob, tuple((top.token_id, top.logprob) for top in item.top)) for item in tokens.logprobs
    )
