"""Every request is counted once, where its client's call ends: with its answers, or before it had any."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from services.router.dispatch.record import Ask, RequestRecord
from shared.errors import Cancelled, Internal, TandemError


class Ledger(Protocol):
    """Counts requests."""

    def ended(self, record: RequestRecord) -> None:
        """One request is over for its client, and its record closed. Must not raise."""
        ...


class Uncounted:
    """Counts nothing."""

    def ended(self, record: RequestRecord) -> None:
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
    records: list[RequestRecord] = field(default_factory=list)
    """Records of its requests that are over, or one of the call itself where it was refused."""


class CallEntry:
    """One client's call, a context manager, and the ledger of its requests. It is counted as one request where it ends
    before its answers are counted each, as one that was refused or whose client left meanwhile."""

    def __init__(self, ledger: Ledger, arrived_at: float) -> None:
        """`arrived_at`: time.perf_counter() seconds."""
        self.note = CallNote()
        self._ledger = ledger
        self.arrived_at = arrived_at
        self._answered = False

    def answers_begin(self) -> None:
        """From now on each of its answers is counted by its own."""
        self._answered = True

    def ended(self, record: RequestRecord) -> None:
        """See `Ledger`."""
        self.note.records.append(record)
        self._ledger.ended(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if not self._answered:
            record = RequestRecord(Ask(arrived_at=self.arrived_at))
            record.close(outcome_of(error))
            self.ended(record)
