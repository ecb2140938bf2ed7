"""What is remembered of one model's requests behind their end."""

from __future__ import annotations

from services.router.dispatch.record import ENDS, RequestEvent, RequestRecord
from services.router.views.attribution.ring import EndedRequests
from services.router.views.attribution.verdict import Targets, outcome
from services.router.views.explanation import Explained
from services.router.views.metrics import COUNTED, RouterMetrics
from services.router.views.recorder import Recorder

MAX_EXPLAINED = 1024
"""Requests whose placement `tandem explain` can show."""
MAX_ENDED = 2048
"""Ended requests that are remembered for windows of the status, about 2 KB each."""

_PLACED = RequestEvent.PLACED  # reading a member of an enum takes 0.1 µs
_FOLLOWED = COUNTED.union(ENDS)
"""Events that matter here, two of an ordinary request's ten: one look passes over the others."""


class RequestLog:
    """Implements `RecordObserver`: counts events, and keeps records for explanations and for windows of the status."""

    def __init__(self, metrics: RouterMetrics, targets: Targets) -> None:
        """`targets`: by which ended requests are judged."""
        self._metrics = metrics
        self.explained = Explained(MAX_EXPLAINED)
        self.ended = EndedRequests(MAX_ENDED, targets)
        self.recorder = Recorder()

    def noted(self, record: RequestRecord) -> None:
        """See `RecordObserver`."""
        event = record.entries[-1].event
        if event not in _FOLLOWED:
            return
        self._metrics.noted(record)
        if event is _PLACED:
            self.explained.add(record)
        elif event in ENDS:
            self.recorder.ended(record)
            if outcome(record) is not None:
                self.ended.add(record)
