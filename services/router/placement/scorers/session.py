"""Scores a worker by whether it served the conversation's last turn; useful when the index lags or is unavailable."""

from __future__ import annotations

from collections import OrderedDict

from services.router.placement.scorers.scorer import Scorer, ScoringContext
from services.router.placement.views import WorkerView


def stickiness(view: WorkerView, context: ScoringContext) -> float:
    """1 for the worker that served the session's last turn at this stage, else 0."""
    return 1.0 if view.name == context.last else 0.0


def _has_last(context: ScoringContext) -> bool:
    return bool(context.last)


SCORER = Scorer(
    setting="session",
    name="session",
    stages=("prefill",),
    default_weight=0.1,
    doc="Prefill worker: served the conversation's last turn.",
    score=stickiness,
    applies=_has_last,
)
DECODE_SCORER = Scorer(
    setting="decode_session",
    name="session",
    stages=("decode", "collocated"),
    default_weight=0.1,
    doc="Decode worker: served the conversation's last turn.",
    score=stickiness,
    applies=_has_last,
)


class SessionTable:
    """The last workers of each session, for the `limit` most recent sessions."""

    def __init__(self, limit: int) -> None:
        """`limit` 0 keeps none."""
        self._limit = limit
        self._last: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def last(self, session: str) -> tuple[str, str]:
        """(prefill worker, decode worker) of the last turn; empty names where unknown."""
        return self._last.get(session, ("", ""))

    def note(self, session: str, prefill: str, decode: str) -> None:
        """Records a placed turn. An empty `prefill` (the decode worker prefilled) keeps the earlier name."""
        if not session or not self._limit:
            return
        self._last[session] = (prefill or self.last(session)[0], decode)
        self._last.move_to_end(session)
        if len(self._last) > self._limit:
            self._last.popitem(last=False)
