"""The one account of a request: what was asked, what happened when, and what it counted.

The core appends an entry with each transition and the edge closes the record when the client has its answer, or is
gone. Whatever is shown of a request (metrics, spans, the access log, rows of the status, explanations, timings in the
answer) is a function of its record: see `services/router/views`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from services.router.admission.blocked import Cause
from services.router.dispatch.states import RequestEvent, RequestState
from services.router.placement.decision import Choice
from services.router.placement.moves import MoveCause
from shared.engine.finish_reason import FinishReason
from shared.errors import Internal, TandemError
from shared.telemetry.trace_context import TraceContext

FINISHED = "finished"
"""The outcome of a request that its client got the answer to."""

_ENDS = (RequestEvent.FINISH, RequestEvent.FAIL, RequestEvent.CANCEL)
_SPAN_IDS = (1 << 64) - 1


class Ask(NamedTuple):
    """What was asked. Without the prompt itself: records are kept longer than requests."""

    request_id: str = ""
    """Empty: the call was refused before it had become a request."""
    tenant: str = ""
    arrived_at: float = 0.0
    """time.perf_counter() seconds, when the edge had the head of the call."""
    num_prompt_tokens: int = 0
    prompt: int = 0
    """The same number for all answers to one prompt of a call."""
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    ttft_timeout_s: float = 0.0
    """The client's own target for the first token; 0 = the router's."""
    trace: TraceContext | None = None
    """Of the call's root span; of the client's own span where the router records none."""
    is_traced: bool = False
    """The router records spans of it."""


class Failure(NamedTuple):
    """An error, as long as a record lives: an exception would keep the frames that it passed alive."""

    code: str
    message: str
    http_status: int

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What is not a TandemError is a bug: `internal_error`."""
        if isinstance(error, TandemError):
            return cls(error.code, str(error), error.http_status)
        return cls(Internal.code, f"{type(error).__name__}: {error}", Internal.http_status)


class MoveNote(NamedTuple):
    """Why and between which workers an answer was to move; what became of it is in the entries behind its MOVE."""

    cause: MoveCause
    source: str
    target: str


class Entry(NamedTuple):
    """One event of a request."""

    event: RequestEvent
    state: RequestState
    """The state that it led to."""
    at: float
    """time.perf_counter() seconds."""
    worker: str = ""
    """PLACED: the decode worker; SUBMITTED: the one that computes the prompt; SENDER_LOST: the next prefill worker;
    RETRY: those that may have caused it, comma-separated, empty where none is charged with it. Of a move always the
    decode worker that the answer moves to."""
    error: Failure | None = None
    """Why the state before it ended."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Grows until the request has ended for the core and for its client. On the event loop alone."""

    ask: Ask
    entries: list[Entry] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """One for each PLACED, in order."""
    moves: list[MoveNote] = field(default_factory=list)
    """One for each MOVE, in order."""
    waits: Mapping[Cause, float] = field(default_factory=dict)
    """Seconds in the queue, by what the queue's head waited for."""
    num_failures: int = 0
    """Attempts that failed, and prefill workers that were replaced; attempts that a full worker refused are neither."""

    num_output_tokens: int = 0
    """From the workers, without those of an earlier call."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was not recomputed."""
    num_fetched_tokens: int = 0
    """Of these, tokens fetched from other workers or store nodes."""
    num_peer_tokens: int = 0
    """Of the fetched ones, tokens from other workers' pools."""

    # Milliseconds by the workers' own clocks, 0 where not known: of the reservation, of the first token, of the last.
    reserve_on_worker_ms: float = 0.0
    prefix_fetch_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_compute_ms: float = 0.0
    first_decode_step_ms: float = 0.0
    decode_ms: float = 0.0
    """From the join, or the decode worker's own first token, to the last one."""
    preempted_ms: float = 0.0
    """Of `decode_ms`, without blocks."""

    # The client's end.
    outcome: str = ""
    """FINISHED, the code of the error that the client got, or `cancelled` where it left; empty while it is served."""
    reason: FinishReason | None = None
    """Set where it finished; for a stop string STOP, as the client receives it."""
    num_given_tokens: int = 0
    """Output tokens that the client was given on this call: a stop string cuts off later ones."""
    delivered_at: float = 0.0
    """time.perf_counter() when the writer of the reply had passed on the last of it, or the client was gone."""

    _span_base: int = 0

    def add(
        self,
        event: RequestEvent,
        state: RequestState,
        worker: str = "",
        error: Failure | None = None,
        at: float = 0.0,
    ) -> None:
        """Appends an event; `at`: now where it is 0."""
        self.entries.append(Entry(event, state, at or time.perf_counter(), worker, error))

    def close(self, outcome: str, reason: FinishReason | None = None, num_given_tokens: int = 0) -> None:
        """Closes the record: the client has its whole answer, or an error."""
        self.outcome, self.reason, self.num_given_tokens = outcome, reason, num_given_tokens
        self.delivered_at = time.perf_counter()

    @property
    def state(self) -> RequestState:
        """Where it is, or how it ended, for the core."""
        return self.entries[-1].state if self.entries else RequestState.QUEUED

    @property
    def has_ended(self) -> bool:
        """The core has no more events for it."""
        return bool(self.entries) and self.entries[-1].event in _ENDS

    @property
    def decode_worker(self) -> str:
        """Of the newest attempt, the one to which the answer has moved; empty before the first."""
        for entry in reversed(self.entries if self.moves else ()):
            if entry.event in (RequestEvent.SWITCHED, RequestEvent.LEFT_ALONE):
                return entry.worker
            if entry.event is RequestEvent.PLACED:
                break
        return self.choices[-1].decode if self.choices else ""

    @property
    def prefill_worker(self) -> str:
        """Of the newest attempt; empty before the first, and where the decode worker computes the prompt."""
        if not self.choices or self.choices[-1].prefill is None:
            return ""
        for entry in reversed(self.entries):
            if entry.event is RequestEvent.SENDER_LOST:
                return entry.worker
            if entry.event is RequestEvent.PLACED:
                break
        return self.choices[-1].prefill

    def span_id(self, index: int) -> int:
        """The id of the span that begins with an entry: the workers and the index get it before the span is made."""
        self._span_base = self._span_base or random.getrandbits(64)
        return (self._span_base + index & _SPAN_IDS) or 1

    def traceparent(self, *, following: bool = False) -> str:
        """What a worker or the index gets of the trace, below the span of the newest entry, or of the one that follows;
        empty without a trace."""
        trace = self.ask.trace
        if trace is None:
            return ""
        if not self.ask.is_traced:
            return trace.traceparent
        return trace.traceparent_under(self.span_id(len(self.entries) - (not following)))


class RecordObserver(Protocol):
    """Follows the core's records."""

    def noted(self, record: RequestRecord) -> None:
        """Its newest entry was added. On the event loop; must not raise."""
        ...


class Unobserved:
    """Follows nothing."""

    def noted(self, record: RequestRecord) -> None:
        """See `RecordObserver`."""


UNOBSERVED = Unobserved()
