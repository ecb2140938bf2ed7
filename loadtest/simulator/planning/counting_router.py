"""Tandem's simulated router with the counters that the planner reads from a real one's metrics."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.simulator.outcome import Targets
from loadtest.simulator.request import SimRequest
from loadtest.simulator.tandem_router import TandemRouter


@dataclass(slots=True)
class Counts:
    """Sums since the start."""

    num_arrived: int = 0
    num_answered: int = 0
    ttft_sum_s: float = 0.0
    num_late: int = 0
    num_finished: int = 0
    num_slow: int = 0
    tpot_sum_s: float = 0.0


class CountingRouter(TandemRouter):
    """Counts; places and admits as its base does."""

    counts: Counts
    targets: Targets

    def submit(self, request: SimRequest) -> None:
        """See `TandemRouter`."""
        self.counts.num_arrived += 1
        super().submit(request)

    def refuse(self, request: SimRequest) -> None:
        super().refuse(request)
        self.counts.num_late += 1

    def _on_first_token(self, request: SimRequest, on_worker_s: float, num_cached: int) -> None:
        super()._on_first_token(request, on_worker_s, num_cached)
        self.counts.num_answered += 1
        self.counts.ttft_sum_s += request.ttft_s
        self.counts.num_late += request.ttft_s > self.targets.ttft_s

    def _on_done(self, request: SimRequest) -> None:
        super()._on_done(request)
        self.counts.num_finished += 1
        self.counts.tpot_sum_s += request.tpot_s
        self.counts.num_slow += request.tpot_s > self.targets.tpot_s
