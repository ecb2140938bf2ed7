"""Every request is counted once, where its client's call ends: with its answers, or before it had any."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from services.router.request import FinishReason, Request, RequestSummary
from shared.errors import Cancelled, Internal, TandemError

FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How one request ended."""

    outcome: str
    """`finished`, or the code of what ended it: an error's, `cancelled` where the client left."""
    duration_s: float
    """From its arrival."""
    request: Request | None = None
    """None: it was refused before it had become one."""
    reason: FinishReason | None = None
    """Set where it finished; of a stop string STOP, as the client is told."""
    num_output_tokens: int = 0
    """Given to the client on this call."""
    summary: RequestSummary = field(default_factory=RequestSummary)
    tokens_s: float = 0.0
    """From its first token to its last."""


class Ledger(Protocol):
    """Who counts."""

    def ended(self, end: RequestEnd) -> None:
        """One request is over. Must not raise."""
        ...


class Uncounted:
    """Counts nothing."""

    def ended(self, end: RequestEnd) -> None:
        """See `Ledger`."""


def outcome_of(error: BaseException | None) -> str:
    """The outcome of a request that an error ended; None: its client left, or its reader does not want the rest."""
    if error is None or isinstance(error, asyncio.CancelledError | GeneratorExit):
        return Cancelled.code
    return error.code if isinstance(error, TandemError) else Internal.code


@dataclass(slots=True)
class CallNote:
    """What becomes known of a client's call while it is served, for the log."""

    request_id: str = ""
    tenant: str = ""
    model: str = ""
    trace_id: str = ""  # 32 hex digits; empty without a trace
    ends: list[RequestEnd] = field(default_factory=list)
    """Of its requests, or of the call itself where it was refused."""


class CallEntry:
    """One client's call, a context manager, and the ledger of its requests. It is counted as one request where it ends
    before its answers are counted each, as one that was refused or whose client left meanwhile."""

    def __init__(self, ledger: Ledger, arrived_at: float) -> None:
        """`arrived_at`: time.perf_counter() seconds."""
        self.note = CallNote()
        self._ledger = ledger
        self._arrived_at = arrived_at
        self._answered = False

    def answers_begin(self) -> None:
        """From now on each of its answers is counted by its own."""
        self._answered = True

    def ended(self, end: RequestEnd) -> None:
        """See `Ledger`."""
        self.note.ends.append(end)
        self._ledger.ended(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if not self._answered:
            self.ended(RequestEnd(outcome_of(error), time.perf_counter() - self._arrived_at))
