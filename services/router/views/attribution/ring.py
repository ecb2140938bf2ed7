"""The newest ended requests, bounded; each is judged once."""

from __future__ import annotations

from collections import deque

from services.router.dispatch.record import RequestRecord
from services.router.views.attribution.verdict import Outcome, Targets, Verdict, judge, outcome
from services.router.views.timings import ended_at

_DELIVERY_S = 60.0
"""For this long a client may still be taking its answer; afterwards a verdict is final."""


class _Entry:
    __slots__ = ("final", "record", "verdict")

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.verdict: Verdict | None = None
        self.final = False


class EndedRequests:
    """The newest ended requests, in the order in which they ended. For the event loop's thread alone."""

    def __init__(self, limit: int, targets: Targets) -> None:
        """Keeps `limit` requests."""
        self.targets = targets
        self._limit = limit
        self._entries: deque[_Entry] = deque(maxlen=limit)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, record: RequestRecord) -> None:
        """Takes one that has ended; forgets the oldest where there are too many."""
        self._entries.append(_Entry(record))

    def newest(self, count: int, now_s: float) -> list[tuple[RequestRecord, Verdict]]:
        """The last that ended, newest first."""
        found: list[tuple[RequestRecord, Verdict]] = []
        for entry in reversed(self._entries):
            if len(found) == count:
                break
            found.append((entry.record, self._verdict(entry, now_s)))
        return found

    def within(self, window_s: float, now_s: float) -> list[tuple[RequestRecord, Verdict]]:
        """The requests that ended in the last `window_s`, newest first."""
        found: list[tuple[RequestRecord, Verdict]] = []
        for entry in reversed(self._entries):
            if now_s - ended_at(entry.record) > window_s:
                break
            found.append((entry.record, self._verdict(entry, now_s)))
        return found

    def reach_s(self, window_s: float, now_s: float) -> float:
        """How far back `within` sees, at most `window_s`: less where some of that time was forgotten."""
        if len(self._entries) < self._limit:
            return window_s
        return min(window_s, now_s - ended_at(self._entries[0].record))

    def find(self, request_id: str, now_s: float) -> tuple[RequestRecord, Verdict] | None:
        """The last one of that id."""
        found = next((entry for entry in reversed(self._entries) if entry.record.ask.request_id == request_id), None)
        return None if found is None else (found.record, self._verdict(found, now_s))

    def _verdict(self, entry: _Entry, now_s: float) -> Verdict:
        """Judged again until the client has taken all, or is not waited for any more."""
        if entry.verdict is None or not entry.final:
            record = entry.record
            entry.verdict = judge(record, self.targets)
            is_read = outcome(record) is not Outcome.FINISHED or record.delivered_at > 0.0
            entry.final = is_read or now_s - ended_at(record) > _DELIVERY_S
        return entry.verdict
