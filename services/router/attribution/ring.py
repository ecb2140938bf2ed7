"""The newest ended requests, bounded; each is judged once."""

from __future__ import annotations

from collections import deque

from services.router.attribution.ended import Ended, Outcome
from services.router.attribution.verdict import Targets, Verdict, judge

_DELIVERY_S = 60.0
"""For this long a client may still be taking its answer; afterwards a verdict is final."""


class _Entry:
    __slots__ = ("ended", "final", "verdict")

    def __init__(self, ended: Ended) -> None:
        self.ended = ended
        self.verdict: Verdict | None = None
        self.final = False


class EndedRequests:
    """In the order in which they ended. On the event loop alone."""

    def __init__(self, limit: int, targets: Targets) -> None:
        """Keeps `limit` requests."""
        self.targets = targets
        self._limit = limit
        self._entries: deque[_Entry] = deque(maxlen=limit)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, ended: Ended) -> None:
        """Forgets the oldest where there are too many."""
        self._entries.append(_Entry(ended))

    def newest(self, count: int, now_s: float) -> list[tuple[Ended, Verdict]]:
        """The last that ended, newest first."""
        found: list[tuple[Ended, Verdict]] = []
        for entry in reversed(self._entries):
            if len(found) == count:
                break
            found.append((entry.ended, self._verdict(entry, now_s)))
        return found

    def within(self, window_s: float, now_s: float) -> list[tuple[Ended, Verdict]]:
        """Those that ended in the last `window_s`, newest first."""
        found: list[tuple[Ended, Verdict]] = []
        for entry in reversed(self._entries):
            if now_s - entry.ended.ended_s > window_s:
                break
            found.append((entry.ended, self._verdict(entry, now_s)))
        return found

    def reach_s(self, window_s: float, now_s: float) -> float:
        """How far back `within` sees, at most `window_s`: less where some of that time was forgotten."""
        if len(self._entries) < self._limit:
            return window_s
        return min(window_s, now_s - self._entries[0].ended.ended_s)

    def find(self, request_id: str, now_s: float) -> tuple[Ended, Verdict] | None:
        """The last one of that id."""
        found = next((entry for entry in reversed(self._entries) if entry.ended.request_id == request_id), None)
        return None if found is None else (found.ended, self._verdict(found, now_s))

    def _verdict(self, entry: _Entry, now_s: float) -> Verdict:
        """Judged again until the client has taken all, or is not waited for any more."""
        if entry.verdict is None or not entry.final:
            ended = entry.ended
            entry.verdict = judge(ended, self.targets)
            is_read = ended.outcome is not Outcome.FINISHED or ended.summary.delivered_at > 0.0
            entry.final = is_read or now_s - ended.ended_s > _DELIVERY_S
        return entry.verdict
