"""What became of moves of running answers, by the request's record."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from services.router.dispatch.record import Entry, MoveNote, RequestEvent, RequestRecord
from services.router.dispatch.transitions import HOLDERS, Holder


class MoveOutcome(Enum):
    """The values are the metrics' labels."""

    MOVED = "moved"
    CARRIED = "carried"
    """The old worker failed while the next one prepared, which went on."""
    STAYED = "stayed"
    """The next worker failed, refused or took too long."""
    ENDED = "ended"
    """The answer ended first, or its attempt."""


class MoveAccount(NamedTuple):
    """One move of a request."""

    note: MoveNote
    began_at: float
    """time.perf_counter() seconds."""
    outcome: MoveOutcome | None
    """None while it is under way."""
    ended_at: float
    """Time at which the outcome was known; 0 while it is not."""
    error: str
    """The code of the error that decided it; empty where none did."""


def move_outcome(record: RequestRecord) -> MoveOutcome | None:
    """The outcome of the move that the newest entry decided; None where it decided none."""
    return _outcome(record.entries[-2], record.entries[-1]) if len(record.entries) > 1 else None


def move_accounts(record: RequestRecord) -> Iterator[MoveAccount]:
    """All moves of a request, in order."""
    notes = iter(record.moves)
    note: MoveNote | None = None
    began_at = 0.0
    for before, entry in zip(record.entries, record.entries[1:], strict=False):
        if entry.event is RequestEvent.MOVE:
            note, began_at = next(notes), entry.at
        elif note is not None and (outcome := _outcome(before, entry)) is not None:
            yield MoveAccount(note, began_at, outcome, entry.at, entry.error.code if entry.error is not None else "")
            note = None
    if note is not None:
        yield MoveAccount(note, began_at, None, 0.0, "")


def _outcome(before: Entry, entry: Entry) -> MoveOutcome | None:
    """What an entry decided, if the answer was on two workers before it and is not any more."""
    if Holder.NEXT not in HOLDERS[before.state] or Holder.NEXT in HOLDERS[entry.state]:
        return None
    if entry.event is RequestEvent.SWITCHED:
        return MoveOutcome.MOVED
    if entry.event is RequestEvent.LEFT_ALONE:
        return MoveOutcome.CARRIED
    failed = entry.event is RequestEvent.STAYED and entry.error is not None
    return MoveOutcome.STAYED if failed else MoveOutcome.ENDED
