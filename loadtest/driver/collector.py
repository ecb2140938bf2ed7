"""Live counts of a run, and its records."""

from __future__ import annotations

import time

from loadtest.clients.base import RequestFailed
from loadtest.metrics import request_metrics
from loadtest.records import Failure, FailureCause, RequestRecord
from loadtest.slo import Slo


class Collector:
    """All requests of a run. Use it on the event loop's thread."""

    def __init__(self, slo: Slo | None) -> None:
        self._slo = slo
        self.start_s = 0.0
        """`time.perf_counter()` at the run's start."""
        self.records: list[RequestRecord] = []
        self.num_sent = 0
        self.num_in_flight = 0
        self.num_done = 0
        self.num_failed = 0
        self.num_good = 0
        self.unreachable_since_s: float | None = None
        """Since when no connection to the target could be made, from the run's start."""
        self.last_failure: Failure | None = None

    def begin(self) -> None:
        """Starts the clock."""
        self.start_s = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start_s

    def sent(self, record: RequestRecord) -> None:
        """Notes that a request was sent."""
        self.records.append(record)
        self.num_sent += 1
        self.num_in_flight += 1

    def finished(self, record: RequestRecord, error: RequestFailed | None) -> None:
        """Notes that a sent request has its answer or has failed."""
        self.num_in_flight -= 1
        record.reply.rebase(self.start_s)
        if error is not None:
            self._failed(record, error.failure)
            return
        self.num_done += 1
        self.unreachable_since_s = None
        metrics = request_metrics(record)
        if self._slo is None or (metrics is not None and self._slo.met(metrics.ttft_s, metrics.tpot_s)):
            self.num_good += 1

    def never_sent(self, record: RequestRecord, failure: Failure) -> None:
        """Notes a turn whose conversation ended early: it was offered and counts as a miss."""
        self.records.append(record)
        record.failure = failure
        self.num_failed += 1

    def _failed(self, record: RequestRecord, failure: Failure) -> None:
        record.failure = failure
        if failure.cause is FailureCause.INTERRUPTED:
            return
        self.num_failed += 1
        self.last_failure = failure
        if failure.cause is not FailureCause.UNREACHABLE:
            # Any other failure means that the server answered.
            self.unreachable_since_s = None
        elif self.unreachable_since_s is None:
            self.unreachable_since_s = self.now_s
