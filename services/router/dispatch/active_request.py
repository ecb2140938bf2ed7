"""One request in the router's core: what it has produced, its timings, its deltas on the way to the client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from services.router.attribution.blocked import Waits
from services.router.dispatch.quarantine import Deaths
from services.router.dispatch.states import RequestEvent, RequestState, after
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
from shared.telemetry.logs import request_log

logger = logging.getLogger(__name__)

_FINISHED = RequestState.FINISHED  # looked at for each token: reading a member of an enum takes 0.1 µs


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

    def __init__(self, request: Request, coalescer: WriteCoalescer, serial: int = 1) -> None:
        """`coalescer` wakes its reader. `serial`: the number of this call, another one for each."""
        self.request = request
        self._serial = serial
        self.log = request_log(logger, request.request_id, request.trace.trace_id)
        self.summary = RequestSummary()
        self.waits: Waits = {}
        """Time in the queue, by what its head waited for."""
        self.num_attempts = 0
        """Attempts begun; each has an id of its own on the workers."""
        self.produced: list[int] = list(request.resumed_token_ids)
        """Output tokens so far, those of an earlier call included: a retry continues behind them."""
        self.num_resumed = len(self.produced)
        """Of these, tokens of an earlier call."""
        self.taken_over = False
        """The client goes on with it on another call."""
        self.hits: PrefixHits = NO_HITS
        """Where its prefix lies, by the index."""
        self.failed_workers: set[str] = set()
        """Names of those that may have caused the failures since the last token: the next attempt goes elsewhere."""
        self.deaths = Deaths()
        """Of workers that held it."""
        self.num_failures_in_all = 0
        """Those before its last token included."""
        self._num_failures = 0
        self._num_charged = 0  # tokens produced when the last failure was charged
        self.timeline = Timeline(accepted=request.arrived_at or time.perf_counter())
        self.task: asyncio.Task[None] | None = None
        self.state = RequestState.QUEUED
        """Changed by `move` alone."""
        self.trace = request.trace.request(self)
        """Its spans; None where nothing is recorded."""
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
    def num_output_tokens(self) -> int:
        """Output tokens of this call."""
        return len(self.produced) - self.num_resumed

    @property
    def wire_id(self) -> str:
        """The id of its reservation: one for each attempt of each call, so that messages of an earlier one are ignored,
        also where a client uses its request id again. The attempt's first prefill worker knows the request by it too;
        later ones by `Attempt`'s sender id."""
        return f"{self.request.request_id}#{self._serial}.{self.num_attempts}"

    @property
    def finished(self) -> bool:
        """Its last token came."""
        return self.state is RequestState.FINISHED

    # --- the dispatcher's side

    def move(self, event: RequestEvent) -> None:
        """Takes the event; raises Internal where the present state has no such transition."""
        self.state = after(self.state, event)
        if self.trace is not None:
            self.trace.moved(event)

    def note_error(self, error: Exception) -> None:
        """Why its present state will end, for its trace."""
        if self.trace is not None:
            self.trace.error = error

    @property
    def num_failures(self) -> int:
        """Failures since the last token."""
        return self._num_failures if len(self.produced) == self._num_charged else 0

    def charge(self, suspects: Iterable[str]) -> None:
        """Counts a failure that these workers may have caused."""
        if len(self.produced) > self._num_charged:
            self.failed_workers = set()
        self._num_failures = self.num_failures + 1
        self.num_failures_in_all += 1
        self._num_charged = len(self.produced)
        self.failed_workers |= set(suspects)

    def emit(self, tokens: types_pb2.SequenceTokens) -> None:
        """Passes new tokens on to the client; what a slow client has not taken yet goes in one message."""
        token_ids = tuple(tokens.token_ids)
        prompt = _logprobs(tokens.prompt_logprobs) if tokens.prompt_logprobs and not self.produced else ()
        self.produced.extend(token_ids)
        finish = finish_reason_from_proto(tokens.finish_reason)
        logprobs = _logprobs(tokens.logprobs) if tokens.logprobs else ()
        waiting = self._pending
        if waiting is None:
            self._pending = TokenDelta(token_ids, logprobs, finish, prompt)
        else:
            joined = waiting.logprobs + logprobs
            self._pending = TokenDelta(waiting.token_ids + token_ids, joined, finish, waiting.prompt_logprobs)
        if finish is None:
            self._wake_reader()
        else:
            self.summary.last_token_at = time.perf_counter()
            self.summary.decode_ms, self.summary.preempted_ms = tokens.decode_ms, tokens.preempted_ms
            self.move(RequestEvent.FINISH)

    def take_over(self) -> None:
        """Ends it for a later call of the same request; its own client gets TakenOver."""
        self.taken_over = True
        if self.task is not None:
            self.task.cancel()

    def settle(self) -> None:
        """Releases the last delta: its reader finds the workers free, the request counted and its id free again."""
        self._settled = True
        self._wake_reader()

    def fail(self, error: TandemError) -> None:
        """Ends the client's stream with an error, behind what came before."""
        self._error = error
        self.note_error(error)
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
        self.summary.num_cached_tokens = min(tokens.num_cached_tokens, self.request.num_prompt_tokens)
        self.summary.num_fetched_tokens = tokens.num_fetched_tokens
        self.summary.num_peer_tokens = tokens.num_peer_tokens

    def on_second_token(self, tokens: types_pb2.SequenceTokens, now: float) -> None:
        """Notes what lay between the first two tokens of a handed-off request."""
        between_ms = (now - self.timeline.first_token) * 1e3
        self.summary.ttft.first_decode_step_ms = tokens.first_decode_step_ms
        self.summary.ttft.ship_exposed_ms = max(0.0, between_ms - tokens.first_decode_step_ms)

    # --- the edge's side

    def take(self) -> TokenDelta | None:
        """See `RunningRequest`."""
        if self.state is _FINISHED and not self._settled:
            return None  # the end came between the reader's waking and its turn
        delta, self._pending = self._pending, None
        if delta is None and self._error is not None:
            raise self._error
        return delta

    def notify(self, reader: asyncio.Future[None]) -> None:
        """See `RunningRequest`; the reader is woken when the coalescer lets it write."""
        self._reader = reader
        if self._settled or self._error is not None or (self._pending is not None and not self.finished):
            self._wake_reader()

    @property
    def ended(self) -> bool:
        """See `RunningRequest`."""
        return self._settled and self._pending is None and self._error is None

    async def aclose(self) -> None:
        """See `RunningRequest`: cancels the dispatcher's task, which frees what the workers hold."""
        task, self.task = self.task, None
        self.summary.delivered_at = self.summary.delivered_at or time.perf_counter()
        if task is not None and not self._settled:
            task.cancel()
            await asyncio.wait((task,))
            await asyncio.sleep(0)  # where the task was done before, its callback is still to run

    # --- between the two

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self._coalescer.take(reader, now=not self._has_begun)
            self._has_begun = True


def _logprobs(entries: Iterable[types_pb2.PositionLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(item.logprob, tuple((top.token_id, top.logprob) for top in item.top)) for item in entries
    )
