"""The one account of a request: what was asked, what happened when, and what it counted.

The core appends an entry with each transition and the edge closes the record when the client has its answer, or is
gone. Whatever is shown of a request (metrics, spans, the access log, rows of the status, explanations, timings in the
answer) is a function of its record: see `services/router/views`.

The states of a request in the router, and their transitions:

    queued ──► reserved ──► prefilling ──► shipping ──► decoding ──► finished
      ▲           │             │             │            │
      └───────────┴── retry ────┴─────────────┴────────────┘     failed, cancelled: from each of the living ones

A prefill worker that is lost costs no retry where another one can serve the same reservation: from prefilling to
reassigning, from shipping to resuming, until the decode worker has said which blocks it still needs. Where its process
died, the request is held in either state until it is known which other workers died with it. A request whose decode
worker computes the prompt itself goes from prefilling to decoding. The answer may also end with its first token.

A running answer may move to another decode worker, which begins before the old one ends:

    decoding ──► copying ──► closing_up ──► repeating ──► decoding
        ▲           │            │              ▲
        └── stayed ─┴────────────┘              └── from copying too: the old worker is lost, or the new one is quick

A state names the holders of memory, and so the workers that a failure is charged to and that need a message about an
early end: the loss of a worker that holds nothing of a request does not touch the request.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from services.router.admission.blocked import Cause
from services.router.placement.decision import Choice
from services.router.placement.moves import MoveCause
from shared.engine.finish_reason import FinishReason
from shared.errors import Internal, TandemError
from shared.telemetry.trace_context import TraceContext

FINISHED = "finished"
"""The outcome of a request that its client got the answer to."""
_SPAN_IDS = (1 << 64) - 1


class RequestState(Enum):
    """The state of a request in the router's core."""

    QUEUED = "queued"
    """In the admission queue, or on its way there."""
    RESERVED = "reserved"
    """Workers are chosen; the decode worker is asked for blocks."""
    PREFILLING = "prefilling"
    """The prompt is being computed; blocks that are sealed are on their way already."""
    OVERTAKEN = "overtaken"
    """The decode worker has joined the request to its batch and sent tokens, which wait in the router: the first token
    is still on its way from the prefill worker."""
    SHIPPING = "shipping"
    """The client has the first token; the last blocks and the trailer are on their way."""
    REASSIGNING = "reassigning"
    """The prefill worker is lost before the first token; the decode worker is asked what it still needs."""
    RESUMING = "resuming"
    """The client has the first token, the prefill worker is lost; the decode worker is asked what it still needs."""
    REASSIGNING_HELD = "reassigning_held"
    """As REASSIGNING, after a death: no prefill worker gets the prompt before every other worker was heard from."""
    RESUMING_HELD = "resuming_held"
    """As RESUMING, after a death: no prefill worker gets the prompt before every other worker was heard from."""
    DECODING = "decoding"
    """The decode worker has joined the request to its batch: it has every block, and the prefill worker is out."""
    COPYING = "copying"
    """The answer runs on its decode worker, and the next one prepares to continue it: fetches its blocks, computes the
    rest."""
    CLOSING_UP = "closing_up"
    """As COPYING: the next worker has all but the newest tokens, and was asked anew with these."""
    REPEATING = "repeating"
    """The answer runs on the next worker alone, which has not sent a token yet that the client lacks."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # a key of tables that are read several times a request: Enum's own is written in Python

    @property
    def ended(self) -> bool:
        """No event is expected any more."""
        return self in (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)


class RequestEvent(Enum):
    """What moves a request from state to state."""

    PLACED = "placed"
    """Workers are chosen, and the decode worker is asked for blocks."""
    SUBMITTED = "submitted"
    """The prompt was sent to the worker that computes it."""
    FIRST_TOKEN = "first_token"
    """The first token came: from the prefill worker, or where that is lost from the decode worker's trailer."""
    SENDER_LOST = "sender_lost"
    """The prefill worker is lost, another one is to serve the same reservation."""
    OVERTOOK = "overtook"
    """The decode worker's tokens came before the first one."""
    HELD = "held"
    """The lost prefill worker died with the request: its successor may have died with it."""
    ALL_HEARD = "all_heard"
    """Every other worker was heard from since that death."""
    JOINED = "joined"
    """The decode worker sent its first tokens."""
    MOVE = "move"
    """The answer is to continue on another decode worker, which is asked for it."""
    ASKED_ANEW = "asked_anew"
    """The next worker is asked anew, with the tokens so far: it would repeat too many of them, or differs in one."""
    SWITCHED = "switched"
    """The next worker answered: the old one is out."""
    LEFT_ALONE = "left_alone"
    """The old worker failed while the next one prepared: that one continues."""
    STAYED = "stayed"
    """The move was given up: the next worker failed, or the answer ends where it is."""
    CAUGHT_UP = "caught_up"
    """The next worker sent the first token that the client lacked."""
    RETRY = "retry"
    """The attempt failed in a way that other workers may not: it is queued again."""
    FINISH = "finish"
    """The last token came."""
    FAIL = "fail"
    CANCEL = "cancel"
    """The client left, or a stop string was found."""

    # Moments within a state.
    ACCEPTED = "accepted"
    """The core has taken it."""
    MATCHING = "matching"
    """The index is asked where its prefix lies."""
    MATCHED = "matched"
    """The place of its prefix is known, or will not be; it enters the queue."""
    WAITED = "waited"
    """No worker could start it at once: it stays in the queue."""
    CHOOSING = "choosing"
    """The choice of workers that succeeded began."""
    FULL = "full"
    """Refused: the queue has no room."""
    LATE = "late"
    """Refused: its first token would come too late."""
    TIMEOUT = "timeout"
    """Refused at the end of its time in the queue."""

    __hash__ = object.__hash__  # as above


ENDS = (RequestEvent.FINISH, RequestEvent.FAIL, RequestEvent.CANCEL)
"""Events behind which a request has no other."""


class Ask(NamedTuple):
    """What was asked. Without the prompt itself: records are kept longer than requests."""

    request_id: str = ""
    """Empty: the call was refused before it had become a request."""
    tenant: str = ""
    arrived_at: float = 0.0
    """time.perf_counter() seconds, when the edge had the head of the call."""
    num_prompt_tokens: int = 0
    prompt: int = 0
    """Number of the prompt within its call; all answers to one prompt share it."""
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    ttft_timeout_s: float = 0.0
    """The client's own target for the first token; 0 = the router's."""
    trace: TraceContext | None = None
    """Context of the call's root span, or of the client's own span where the router records none."""
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

    weights: list[str] = field(default_factory=list)
    """Fingerprints of the weights that its tokens are of: one, but where an attempt after a change went on with what
    others before it had produced."""
    num_output_tokens: int = 0
    """Tokens from the workers, without those of an earlier call."""
    num_guessed_tokens: int = 0
    """Guesses of its next tokens that workers checked."""
    num_accepted_tokens: int = 0
    """Of these, right ones, which the workers produced; a stop string may cut them off."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was not recomputed."""
    num_fetched_tokens: int = 0
    """Cached tokens that were fetched from other workers or store nodes."""
    num_peer_tokens: int = 0
    """Fetched tokens that came from other workers' pools."""

    # Milliseconds by the workers' own clocks, 0 where not known: of the reservation, of the first token, of the last.
    reserve_on_worker_ms: float = 0.0
    prefix_fetch_ms: float = 0.0
    adapter_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_compute_ms: float = 0.0
    first_decode_step_ms: float = 0.0
    decode_ms: float = 0.0
    """From the join, or the decode worker's own first token, to the last one."""
    preempted_ms: float = 0.0
    """Part of `decode_ms` in which it had no blocks."""

    # The client's end.
    outcome: str = ""
    """FINISHED, the code of the error that the client got, or `cancelled` where it left; empty while it is served."""
    reason: FinishReason | None = None
    """Set where it finished; for a stop string STOP, as the client receives it."""
    num_given_tokens: int = 0
    """Output tokens that the client was given on this call: a stop string cuts off later ones. Of a beam search those
    of all beams, each step one a beam."""
    delivered_at: float = 0.0
    """time.perf_counter() when the writer of the reply had passed on the last of it, or the client was gone."""

    split: tuple[float, ...] | None = None
    """`TtftSplit` of it, once it has ended and one was made, for all that show it."""

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
        """The request's state in the core, after the newest entry."""
        return self.entries[-1].state if self.entries else RequestState.QUEUED

    @property
    def has_ended(self) -> bool:
        """The core has no more events for it."""
        return bool(self.entries) and self.entries[-1].event in ENDS

    @property
    def decode_worker(self) -> str:
        """The decode worker of the newest attempt, or the one to which the answer has moved; empty before the first."""
        for entry in reversed(self.entries if self.moves else ()):
            if entry.event in (RequestEvent.SWITCHED, RequestEvent.LEFT_ALONE):
                return entry.worker
            if entry.event is RequestEvent.PLACED:
                break
        return self.choices[-1].decode if self.choices else ""

    @property
    def prefill_worker(self) -> str:
        """The prefill worker of the newest attempt; empty before the first, and where the decode worker computes the
        prompt."""
        if not self.choices or self.choices[-1].prefill is None:
            return ""
        for entry in reversed(self.entries if self.num_failures else ()):  # else none was replaced
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
