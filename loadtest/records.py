"""The record of one request. Times are seconds from the run's start, on the clock of `time.perf_counter()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class FailureCause(Enum):
    """Why a request has no complete answer."""

    UNREACHABLE = "unreachable"  # no connection to the target
    DISCONNECTED = "disconnected"  # the connection broke before the answer's end
    TIMEOUT = "timeout"  # --request-timeout of the load test
    DEADLINE = "deadline"  # the server's own
    OVERLOADED = "overloaded"  # refused at once: 429, RESOURCE_EXHAUSTED
    REJECTED = "rejected"  # the server calls the request invalid
    SERVER_ERROR = "server_error"
    PROTOCOL = "protocol"  # the answer cannot be parsed or lacks its token counts
    PREVIOUS_TURN = "previous_turn"  # never sent: the turn before it failed
    INTERRUPTED = "interrupted"  # the run was stopped; not counted as offered


@dataclass(frozen=True, slots=True)
class Failure:
    """A cause, and the server's message."""

    cause: FailureCause
    message: str
    kind: str = ""  # the server's own name for it, e.g. WorkerLost


@dataclass(frozen=True, slots=True)
class TtftSplit:
    """The server's split of one TTFT, milliseconds (tandem.v1.TtftSplit)."""

    queue_ms: float = 0.0
    placement_ms: float = 0.0
    reserve_ms: float = 0.0
    prefix_fetch_ms: float = 0.0
    adapter_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_compute_ms: float = 0.0
    return_ms: float = 0.0
    ttft_ms: float = 0.0  # the whole, as the router measured it
    ship_exposed_ms: float = 0.0  # this and the next come after the first token
    first_decode_step_ms: float = 0.0


@dataclass(slots=True)
class Reply:
    """An answer as it arrives; filled by a client, also if the answer ends in a failure.

    A client writes raw `time.perf_counter()` values; `rebase` turns them into times from the run's start.
    """

    sent_s: float | None = None  # when the request was handed to the network
    token_times_s: list[float] = field(default_factory=list)  # one for each message with tokens
    token_counts: list[int] = field(default_factory=list)  # tokens in that message
    token_ids: list[int] = field(default_factory=list)
    closed_s: float | None = None  # when the answer was complete or had failed
    num_prompt_tokens: int | None = None  # the server's count
    num_output_tokens: int | None = None  # the server's count, independent of the ids
    num_cached_tokens: int | None = None
    counts_exact: bool = True  # False: the server sent no ids, and a message may hold any number of tokens
    split: TtftSplit | None = None
    finish_reason: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""

    def add_tokens(self, at_s: float, token_ids: list[int]) -> None:
        """Notes a message with tokens."""
        self.token_times_s.append(at_s)
        self.token_counts.append(len(token_ids))
        self.token_ids += token_ids

    def rebase(self, start_s: float) -> None:
        """Shifts all times so that `start_s` is 0."""
        self.sent_s = None if self.sent_s is None else self.sent_s - start_s
        self.closed_s = None if self.closed_s is None else self.closed_s - start_s
        self.token_times_s = [at_s - start_s for at_s in self.token_times_s]


@dataclass(slots=True)
class RequestRecord:
    """One request: its content, times and result."""

    index: int
    request_id: str
    num_prompt_tokens: int  # as sent
    max_tokens: int
    due_s: float | None = None  # when it should have been sent; None in a closed loop
    conversation: int = 0
    turn: int = 0
    model: str = ""  # the adapter that was asked for; empty: the run's model
    reply: Reply = field(default_factory=Reply)
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        """Whether it has a complete answer."""
        return self.failure is None

    @property
    def offered(self) -> bool:
        """Whether it counts: all do except those left unfinished by a stopped run."""
        return self.failure is None or self.failure.cause is not FailureCause.INTERRUPTED

    @property
    def lag_s(self) -> float | None:
        """How much later than scheduled it was sent."""
        if self.due_s is None or self.reply.sent_s is None:
            return None
        return self.reply.sent_s - self.due_s
