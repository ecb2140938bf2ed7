"""When sessions are expected back: as clients say, else as their own earlier pauses suggest. Policy only."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MOST_REMEMBERED = 4096
"""Sessions whose pauses are remembered; of more, the one heard of longest ago is forgotten."""
MIN_PAUSES = 3
"""Pauses after which a session's next one is predicted."""
MOST_DEVIATION = 0.6
"""Mean absolute deviation of a session's pauses, as a share of their mean, up to which they predict the next one.
Pauses that are spread evenly from 5 to 60 s have 0.42, exponential ones 0.74: of those, a session that has been away
for long is no nearer to its return, and last use is the better order."""
MEMORY = 8
"""Pauses after which a new one counts for as much as this many before it."""


@dataclass(slots=True)
class _Session:
    ended_at: float | None = None
    """When its last turn ended; None while one runs."""
    said: float | None = None
    """When it comes back, as its client said since its last turn began."""
    num_pauses: int = 0
    mean_s: float = 0.0
    deviation_s: float = 0.0

    def learn(self, pause_s: float) -> None:
        """One more pause."""
        self.num_pauses += 1
        if self.num_pauses == 1:
            self.mean_s = pause_s
            return
        off_s = pause_s - self.mean_s
        self.mean_s += off_s / min(self.num_pauses, MEMORY)
        self.deviation_s += (abs(off_s) - self.deviation_s) / min(self.num_pauses - 1, MEMORY)

    @property
    def usual_s(self) -> float | None:
        """Its pause to expect; None where its earlier ones say too little."""
        if self.num_pauses < MIN_PAUSES or self.deviation_s > MOST_DEVIATION * self.mean_s:
            return None
        return self.mean_s


class NextTurns:
    """What is known of sessions' next turns: a record of constant size each, for at most MOST_REMEMBERED."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        """Sessions remembered."""
        return len(self._sessions)

    def began(self, session: str, now: float) -> None:
        """A turn of the session came. One that is not known, or empty, changes nothing."""
        known = self._sessions.get(session)
        if known is None:
            return
        if known.ended_at is not None:
            known.learn(now - known.ended_at)
        known.ended_at = known.said = None

    def ended(self, session: str, now: float, next_turn_s: float | None) -> float | None:
        """A turn of the session ended; `next_turn_s`: from now until its next one, as its client said with this one.
        Returns when that comes: by this, by `expect` during the turn, or by the session's own pauses; None where
        it is not known."""
        known = self._record(session)
        known.ended_at = now
        if next_turn_s is not None:
            known.said = now + next_turn_s
        if known.said is not None:
            return known.said
        return None if known.usual_s is None else now + known.usual_s

    def expect(self, session: str, at: float) -> None:
        """The client said when the session's next turn comes, maybe while its first one runs."""
        self._record(session).said = at

    def _record(self, session: str) -> _Session:
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session()
            if len(self._sessions) > MOST_REMEMBERED:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(session)
        return known
