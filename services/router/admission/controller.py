"""Admission control: a request predicted to miss its TTFT target is refused at arrival, not after a wait."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from services.router.admission.calibration import WaitCalibration
from services.router.admission.deadline import check_deadline, may_be_late
from services.router.admission.drain_rate import DrainRate
from services.router.admission.queue import AdmissionQueue
from services.router.admission.queue_entry import QueueEntry
from services.router.placement.prediction import TtftPredictor
from services.router.placement.views import Pool
from services.router.placement.work import Work


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was predicted for a request when it was admitted. Times are seconds of the queue's clock."""

    item: QueueEntry
    """The entry with its deadline; infinite if it is admitted although it will be late."""
    entered_s: float
    own_s: float
    """Predicted time from start to first token on an idle worker; 0 while nothing is known."""
    wait_s: float
    """Predicted time until all work ahead of it is done, in the queue and at a worker."""
    grace_s: float = 0.0
    """How late the first token may be before the request is refused after all."""

    @property
    def latest_start_s(self) -> float:
        """The last moment to start it in time."""
        return self.item.deadline_s - self.own_s

    @property
    def given_up_s(self) -> float:
        """If it is not started by then, it is refused although it was admitted."""
        return self.latest_start_s + self.grace_s


class AdmissionController:
    """Refuses requests by calibrated predictions, and learns from the waits of those it admitted."""

    def __init__(self, predictor: TtftPredictor, late_idle_share: float, late_grace: float) -> None:
        """`late_idle_share`: see `may_be_late`. `late_grace`: the share of its TTFT target by which an admitted request
        may be late: a client that has waited prefers the answer to a refusal."""
        self.calibration = WaitCalibration()
        self._drain = DrainRate()
        self._predictor = predictor
        self._late_idle_share = late_idle_share
        self._late_grace = late_grace

    def enter(
        self,
        item: QueueEntry,
        now_s: float,
        queue: AdmissionQueue[Any],
        pool: Pool,
        *,
        num_cached: int,
        strict: bool = False,
        first: bool = False,
    ) -> Estimate:
        """Returns the estimate for an entry before it is pushed; raises Overloaded if it would be late.

        `pool` computes prompts; `num_cached` tokens of this one need no computing. `strict`: never late, neither by
        the grace nor on idle workers. `first`: it was admitted before and goes ahead of all that wait.
        """
        if not queue:
            self._drain.waiting(now_s)
        if math.isinf(item.deadline_s):
            return Estimate(item, now_s, 0.0, 0.0)
        own_s = self._predictor.idle_s(Work.of(item.num_tokens, num_cached)) or 0.0
        too_long = item.arrived_s + own_s > item.deadline_s
        if too_long and not strict and may_be_late(len(queue), pool, self._late_idle_share):
            return Estimate(replace(item, deadline_s=math.inf), now_s, own_s, 0.0)
        wait_s = self._wait_s(now_s, pool, 0 if first else queue.num_tokens_ahead(item)) if queue else 0.0
        grace_s = 0.0 if strict else self._late_grace * (item.deadline_s - item.arrived_s)
        predicted_s = own_s + wait_s * self.calibration.factor if own_s else None
        check_deadline(now_s, item.deadline_s, predicted_s, grace_s if first else 0.0)
        return Estimate(item, now_s, own_s, wait_s, grace_s)

    def start(self, estimate: Estimate, now_s: float, predicted_s: float | None) -> None:
        """The request reaches the head of the queue; a worker would return its first token in `predicted_s`.

        Learns from its wait; raises Overloaded if the first token would come later than allowed.
        """
        if now_s > estimate.entered_s:
            self._drain.started(estimate.item.num_tokens, now_s)
            at_worker_s = max(0.0, predicted_s - estimate.own_s) if predicted_s is not None else 0.0
            self._learn(estimate, now_s - estimate.entered_s + at_worker_s)
        check_deadline(now_s, estimate.item.deadline_s, predicted_s, estimate.grace_s)

    def gave_up(self, estimate: Estimate, now_s: float) -> None:
        """Learns from a request whose wait was abandoned."""
        self._learn(estimate, now_s - estimate.entered_s)

    def _wait_s(self, now_s: float, pool: Pool, num_ahead: int) -> float:
        """The longer of two: the workers compute all that is queued, or the queue drains at its measured rate."""
        by_workers_s = self._predictor.wait_s(num_ahead, pool) or 0.0
        return max(by_workers_s, self._drain.wait_s(num_ahead, now_s)) if num_ahead else by_workers_s

    def _learn(self, estimate: Estimate, waited_s: float) -> None:
        """Requests close to their deadline weigh most: with time to spare, a few milliseconds may be many times the
        predicted wait and mean little."""
        slack_s = estimate.latest_start_s - estimate.entered_s
        if math.isinf(slack_s) or estimate.wait_s <= 0:
            return
        longer_s = max(waited_s, estimate.wait_s * self.calibration.factor)
        self.calibration.observe(estimate.wait_s, waited_s, min(1.0, longer_s / max(slack_s, 1e-9)))
