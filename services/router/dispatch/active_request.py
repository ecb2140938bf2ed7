"""One request in the router's core: what it has produced, its record, its deltas, and when the client gets them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from services.router.dispatch.quarantine import Deaths
from services.router.dispatch.record import (
    UNOBSERVED,
    Failure,
    RecordObserver,
    RequestEvent,
    RequestRecord,
    RequestState,
)
from services.router.dispatch.request import (
    FinishReason,
    FoundAnswer,
    Request,
    TokenDelta,
    TokenLogprobs,
)
from services.router.dispatch.transitions import after
from services.router.placement.lengths import AnswerLife
from services.router.placement.views import NO_HITS, PrefixHits
from shared.errors import DeadlineExceeded, Internal, TandemError, TransferFailed
from shared.rpc.convert import finish_reason_from_proto
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.telemetry.logs import request_log

PAUSE = 2.0
"""From the end of a pass to the next one, in lengths of the pass. A write is paid for about twice, in the pass and when
gRPC reports that it is done; the rest is for reading. Less sends more messages with fewer tokens in each."""
MAX_PAUSE_S = 0.1
"""Longest pause between two passes, seconds: a pass that took longer was delayed by something else than writing."""
MIN_PAUSE_S = 0.001
"""Shortest pause, seconds: timers are no finer."""


class WriteCoalescer:
    """For the readers of one event loop.

    A message to a client costs more than reading its token. If every reader wrote whenever it has one, a busy router
    would spend its core on messages of one token, while newer tokens pile up unread in gRPC's buffers. So all readers
    that have something are woken in one pass, and the next pass begins only when some time in proportion to the last
    one's length has gone by: writing gets a share of the core, and what comes for a stream meanwhile goes out in one
    message. An idle router's pass is over in microseconds, so nothing is held back there. A first token never waits.
    """

    def __init__(self, pause: float = PAUSE) -> None:
        self._pause = pause
        self._waiting: list[asyncio.Future[None]] = []
        self._passing = False  # the next pass is on its way, or one is being written
        self._next_s = 0.0  # perf_counter() before which no pass begins

    def take(self, reader: asyncio.Future[None], *, now: bool = False) -> None:
        """Sets the future's result in the next pass, or with `now` in the loop's next turn; never in this call."""
        if now:
            reader.get_loop().call_soon(_wake, reader)
            return
        self._waiting.append(reader)
        if not self._passing:
            self._begin(reader.get_loop())

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._passing = True
        pause_s = self._next_s - time.perf_counter()
        if pause_s < MIN_PAUSE_S:
            loop.call_soon(self._pass, loop)
        else:
            loop.call_later(pause_s, self._pass, loop)

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        readers, self._waiting = self._waiting, []
        began_s = time.perf_counter()
        for reader in readers:
            _wake(reader)
        # Their tasks stand in the loop's queue now, and this call behind them.
        loop.call_soon(self._written, loop, began_s)

    def _written(self, loop: asyncio.AbstractEventLoop, began_s: float) -> None:
        now_s = time.perf_counter()
        self._next_s = now_s + min(MAX_PAUSE_S, self._pause * (now_s - began_s))
        self._passing = False
        if self._waiting:
            self._begin(loop)


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():  # else its task was cancelled meanwhile
        reader.set_result(None)


logger = logging.getLogger(__name__)

_FINISHED = RequestState.FINISHED  # looked at for each token: reading a member of an enum takes 0.1 µs


class ActiveRequest:
    """State of one request from submit to its last token; implements `RunningRequest` for the edge.

    The dispatcher fills it, the edge reads it; both on the event loop.
    """

    def __init__(
        self,
        request: Request,
        coalescer: WriteCoalescer,
        serial: int = 1,
        record: RequestRecord | None = None,
        observer: RecordObserver = UNOBSERVED,
        life: AnswerLife | None = None,
    ) -> None:
        """`coalescer` wakes its reader. `serial`: the number of this call, another one for each. `record`: the
        request's, a new one where none is given; `observer` follows it. `life` counts how long the answer is."""
        self.request = request
        self._serial = serial
        self.record = record if record is not None else request.new_record()
        """Written by this class and by those that run the request."""
        self._observer = observer
        self._life = life
        trace = self.record.ask.trace
        self.log = request_log(logger, request.request_id, trace.trace_hex if trace is not None else "")
        self.num_attempts = 0
        """Attempts begun."""
        self.wire_id = ""
        """The id of its reservation: one for each attempt of each call, so that messages of an earlier one are ignored,
        also where a client uses its request id again. The attempt's first prefill worker knows the request by it too;
        later ones by `Attempt`'s sender id."""
        self.produced: list[int] = list(request.resumed_token_ids)
        """Output tokens so far, those of an earlier call included: a retry continues behind them."""
        self.stopped: TandemError | None = None
        """Why it ends although no worker failed: taken over by a later call, or its deadline passed."""
        self.hits: PrefixHits = NO_HITS
        """Where its prefix lies, by the index."""
        self.failed_workers: set[str] = set()
        """Names of those that may have caused the failures since the last token: the next attempt goes elsewhere."""
        self.deaths = Deaths()
        """Deaths of workers that held it."""
        self._num_failures = 0
        self._num_charged = 0  # tokens produced when the last failure was charged
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.state = RequestState.QUEUED
        """Changed by `move` alone."""
        self._pending: TokenDelta | None = None  # what the edge has not taken yet, as one
        self._error: TandemError | None = None
        self._settled = False
        self._coalescer = coalescer
        self._has_begun = False  # the edge was given something
        self._reader: asyncio.Future[None] | None = None  # set while the edge waits for more
        self.note(RequestEvent.ACCEPTED)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.request.prompt_token_ids, *self.produced]

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.request.prompt_token_ids) + len(self.produced)  # no call: asked many times a request

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of this call."""
        return self.record.num_output_tokens

    @property
    def finished(self) -> bool:
        """Whether the last token came."""
        return self.state is RequestState.FINISHED

    # --- the dispatcher's side

    def begin_attempt(self) -> None:
        """Another attempt, with a `wire_id` of its own."""
        self.num_attempts += 1
        self.wire_id = f"{self.request.request_id}#{self._serial}.{self.num_attempts}"

    def move(self, event: RequestEvent, worker: str = "", error: BaseException | None = None) -> None:
        """Takes the event, and writes it down; raises Internal where the present state has no such transition.
        `worker` and `error`: see `Entry`."""
        self.state = after(self.state, event)
        self.record.add(event, self.state, worker, Failure.of(error) if error is not None else None)
        self._observer.noted(self.record)

    def note(self, event: RequestEvent, at: float = 0.0) -> None:
        """Writes down a moment within the present state; `at` in time.perf_counter() seconds, now where it is 0."""
        self.record.add(event, self.state, at=at)
        self._observer.noted(self.record)

    @property
    def num_failures(self) -> int:
        """Failures since the last token."""
        return self._num_failures if len(self.produced) == self._num_charged else 0

    @property
    def is_suspect(self) -> bool:
        """Whether a worker died with it, and another death now would quarantine it."""
        return self.deaths.is_near(len(self.produced))

    def charge(self, suspects: Iterable[str]) -> None:
        """Counts a failure that these workers may have caused."""
        if len(self.produced) > self._num_charged:
            self.failed_workers = set()
        self._num_failures = self.num_failures + 1
        self.record.num_failures += 1
        self._num_charged = len(self.produced)
        self.failed_workers |= set(suspects)

    def emit(self, tokens: types_pb2.SequenceTokens) -> None:
        """Passes new tokens on to the client; what a slow client has not taken yet goes in one message."""
        if self.request.sampling.beams is not None:
            self._emit_found(tokens)
            return
        token_ids = tuple(tokens.token_ids)
        prompt = _logprobs(tokens.prompt_logprobs) if tokens.prompt_logprobs and not self.produced else ()
        self.produced.extend(token_ids)
        self._count(len(token_ids))
        if tokens.num_guessed:
            self.record.num_guessed_tokens += tokens.num_guessed
            self.record.num_accepted_tokens += tokens.num_accepted
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
            self.record.decode_ms, self.record.preempted_ms = tokens.decode_ms, tokens.preempted_ms
            self.move(RequestEvent.FINISH)

    def _emit_found(self, tokens: types_pb2.SequenceTokens) -> None:
        """Emits the end of a beam search, which alone is an answer: the tokens before it say that it continues, and a
        retry begins anew."""
        self._count(len(tokens.token_ids))
        finish = finish_reason_from_proto(tokens.finish_reason)
        if finish is None:
            return
        found = tuple(
            FoundAnswer(
                tuple(beam.token_ids),
                finish_reason_from_proto(beam.finish_reason) or FinishReason.LENGTH,
                beam.score,
                beam.logprob,
            )
            for beam in tokens.beams
        )
        if not found:
            raise Internal("the decode worker searches no beams")
        self._pending = TokenDelta((), (), finish, (), found)
        self.record.decode_ms, self.record.preempted_ms = tokens.decode_ms, tokens.preempted_ms
        self.move(RequestEvent.FINISH)

    def _count(self, num_more: int) -> None:
        record, life = self.record, self._life
        record.num_output_tokens += num_more
        if life is not None and record.num_output_tokens > life.due:
            life.at(record.num_output_tokens)

    def count_length(self) -> None:
        """The answer has ended, or nothing more of it comes: what that tells of other answers' lengths."""
        life, self._life = self._life, None
        if life is not None and self.finished:
            life.ended(self.num_output_tokens)
        elif life is not None:
            life.left()

    def begin(self, task: asyncio.Task[None]) -> None:
        """The dispatcher's task runs the request; from now on its time counts."""
        self._task = task
        timeout_s = self.request.timeout_s
        if timeout_s:
            self._deadline = task.get_loop().call_later(timeout_s, self._expire)

    def stop(self, why: TandemError) -> None:
        """Ends it; its client gets the error."""
        if self._task is not None:
            self.stopped = why
            self._task.cancel()

    def _expire(self) -> None:
        timeout_s = self.request.timeout_s
        self.stop(DeadlineExceeded(f"not done within {timeout_s:g} s", limit=timeout_s))

    def settle(self) -> None:
        """Releases the last delta: its reader finds the workers free, the request counted and its id free again."""
        self._settled = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._wake_reader()

    def fail(self, error: TandemError) -> None:
        """Ends the client's stream with an error, behind what came before."""
        self._error = error
        self._wake_reader()

    def check_prompt_logprobs(self, tokens: types_pb2.SequenceTokens, worker: str) -> None:
        """Raises TransferFailed where the first token's worker has not computed the whole prompt though its
        log-probabilities are wanted."""
        request = self.request
        if request.sampling.prompt_logprobs is None or self.produced:
            return
        if len(tokens.prompt_logprobs) != request.num_prompt_tokens - 1:
            raise TransferFailed(
                f"{worker} has computed only {len(tokens.prompt_logprobs)} of the prompt's "
                f"{request.num_prompt_tokens - 1} log-probabilities"
            )

    def on_first_token(self, tokens: types_pb2.SequenceTokens) -> None:
        """Notes what the workers say with the first token of the request's life."""
        record = self.record
        record.prefix_fetch_ms = tokens.prefix_fetch_ms
        record.adapter_ms = tokens.adapter_ms
        record.prefill_queue_ms = tokens.prefill_queue_ms
        record.prefill_compute_ms = tokens.prefill_compute_ms
        record.num_cached_tokens = min(tokens.num_cached_tokens, self.request.num_prompt_tokens)
        record.num_fetched_tokens = tokens.num_fetched_tokens
        record.num_peer_tokens = tokens.num_peer_tokens

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
        task, self._task = self._task, None
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
