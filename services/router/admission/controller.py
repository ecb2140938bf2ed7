"""Admission control: a request predicted to miss its TTFT target is refused at arrival, not after a wait."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from services.router.admission.queue import AdmissionQueue, QueueEntry
from services.router.placement.views import NO_WORK, Pool, Work
from shared.errors import Overloaded

QUANTILE = 0.99
"""The share of admitted requests whose wait should be no longer than predicted."""
STEP = 0.1
"""Largest change by one observation, on the logarithmic scale."""
OPEN = 64
"""Waits that may be open at a time, each with a prediction made and its end to come, before each counts for less."""
MAX_FACTOR = 16.0
"""Bounds the factor both ways: some requests always get in, so that there is something to learn from."""


class WaitCalibration:
    """Learns from (predicted, observed) waits. Plain numbers, no clock.

    A predicted wait knows the tokens ahead and the time a token takes. It does not know what will overtake (other
    tenants, orders other than arrival), that decode workers may prefill too, or that other routers feed the same
    workers. All of that shows in the observed waits. So the decision to refuse at arrival uses the prediction times a
    learnt factor.

    The factor follows a quantile by stochastic approximation (Robbins and Monro, 1951) on a logarithmic scale: up by
    step × quantile when a wait was longer than predicted, down by step × (1 − quantile) when it was not. It forgets
    exponentially and keeps no history.
    """

    def __init__(self, quantile: float = QUANTILE) -> None:
        """`quantile` in (0, 1): the share of waits that should be no longer than predicted."""
        self._quantile = quantile
        self._log = 0.0

    @property
    def factor(self) -> float:
        """Multiplier for predicted waits, in [1 / MAX_FACTOR, MAX_FACTOR]; 1 before the first observation."""
        return math.exp(self._log)

    def observe(self, predicted_s: float, observed_s: float, weight: float = 1.0) -> None:
        """Adds one wait with `weight` in [0, 1]. For an abandoned wait, `observed_s` is its length so far."""
        if predicted_s <= 0:
            return
        longer = observed_s > predicted_s * self.factor
        move = self._quantile if longer else self._quantile - 1.0
        most = math.log(MAX_FACTOR)
        self._log = min(most, max(-most, self._log + STEP * weight * move))


def check_deadline(now_s: float, deadline_s: float, predicted_s: float | None, grace_s: float = 0.0) -> None:
    """Raises Overloaded if the first token, `predicted_s` from now, comes more than `grace_s` after `deadline_s`.

    Without a prediction nothing is refused. The retry hint is the time by which the request is late: after it, the
    same request would be in time if no other request came.
    """
    if predicted_s is None:
        return
    late_s = now_s + predicted_s - deadline_s
    if late_s > grace_s:
        raise Overloaded(
            f"the first token is predicted in {predicted_s:.3g} s, {late_s:.3g} s after its deadline",
            retry_after_s=max(1.0, late_s),
            field="ttft_deadline",
        )


def may_be_late(num_waiting: int, pool: Pool, idle_share: float) -> bool:
    """Whether a prompt that is too long to meet the target on any worker is served all the same.

    It is while the queue is empty and at least `idle_share` of the workers have nothing to prefill: then it delays
    no other request, and leaves a prefix that lets the conversation's next turn be in time. `idle_share` above 1:
    never.
    """
    if num_waiting:
        return False
    num_idle = sum(view.accepting and not view.num_queued_tokens for view in pool)
    return num_idle >= idle_share * max(1, len(pool))


FORGETTING = 0.97
"""The weight of a start halves after about 23 newer ones."""
MIN_STARTS = 8
"""With fewer starts no rate is known."""


class DrainRate:
    """Tokens and seconds of requests that had to wait. Plain numbers, no clock.

    All causes of delay show here: slow prefill, decode workers without room, other routers in front of the same fleet.
    """

    def __init__(self) -> None:
        self._num_starts = 0
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s = 0.0  # the last start, or the arrival of the first waiting request

    def waiting(self, now_s: float) -> None:
        """A request arrived at an empty queue."""
        self._since_s = now_s

    def started(self, num_tokens: int, now_s: float) -> None:
        """A request left the queue for a worker, after it had waited."""
        self._num_starts += 1
        self._tokens = FORGETTING * self._tokens + num_tokens
        self._seconds = FORGETTING * self._seconds + max(0.0, now_s - self._since_s)
        self._since_s = now_s

    def wait_s(self, num_tokens: int, now_s: float) -> float:
        """Seconds until `num_tokens` have left; 0 before enough starts were seen. Call it while requests wait: the
        estimate of a stalled queue grows with time."""
        if self._num_starts < MIN_STARTS:
            return 0.0
        return num_tokens * (self._seconds + max(0.0, now_s - self._since_s)) / self._tokens


class Estimate(NamedTuple):
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
    is_again: bool = False
    """A worker had no room for it after all. It was learnt from when it was started first; each further try, of which
    there may be many until there is room, says nothing new."""
    num_open: int = 0
    """Requests with a deadline that waited when it came: predictions were made for them, and nothing was learnt yet."""

    @property
    def latest_start_s(self) -> float:
        """The last moment to start it in time."""
        return self.item.deadline_s - self.own_s

    @property
    def given_up_s(self) -> float:
        """If it is not started by then, it is refused although it was admitted."""
        return self.latest_start_s + self.grace_s


class WaitPredictor(Protocol):
    """What admission asks of placement's predictions. None: nothing is known yet."""

    def idle_s(self, own: Work, pool: Pool) -> float | None:
        """Seconds to the first token on a worker of the pool whose queue is empty."""

    def wait_s(self, ahead: Work, pool: Pool) -> float | None:
        """Seconds until some worker has computed its queue and its share of what is ahead."""

    def trusted_s(self, predicted_s: float | None) -> float | None:
        """A prediction made where workers were chosen, as far as a request may be refused by it."""


class AdmissionController:
    """Refuses requests by calibrated predictions, and learns from the waits of those it admitted."""

    def __init__(self, predictor: WaitPredictor, late_idle_share: float, late_grace: float) -> None:
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
        load_s: float = 0.0,
        strict: bool = False,
        first: bool = False,
    ) -> Estimate:
        """Returns the estimate for an entry before it is pushed; raises Overloaded if it would be late.

        `pool` computes prompts; `num_cached` tokens of this one need no computing, and `load_s` passes
        until a worker has its adapter. `strict`: never late, neither by
        the grace nor on idle workers. `first`: it was admitted before and goes ahead of all that wait.
        """
        if not queue:
            self._drain.waiting(now_s)
        if math.isinf(item.deadline_s):
            return Estimate(item, now_s, 0.0, 0.0)
        own_s = self._predictor.idle_s(Work.of(item.num_tokens, num_cached), pool) or 0.0
        own_s += load_s if own_s else 0.0
        too_long = item.arrived_s + own_s > item.deadline_s
        if too_long and not strict and may_be_late(len(queue), pool, self._late_idle_share):
            return Estimate(item._replace(deadline_s=math.inf), now_s, own_s, 0.0)
        wait_s = self._wait_s(now_s, pool, NO_WORK if first else _ahead(queue, item)) if queue else 0.0
        grace_s = 0.0 if strict else self._late_grace * (item.deadline_s - item.arrived_s)
        predicted_s = own_s + wait_s * self.calibration.factor if own_s else None
        check_deadline(now_s, item.deadline_s, predicted_s, grace_s if first else 0.0)
        return Estimate(item, now_s, own_s, wait_s, grace_s, first, queue.num_due)

    def start(self, estimate: Estimate, now_s: float, predicted_s: float | None) -> None:
        """The request reaches the head of the queue; a worker would return its first token in `predicted_s`.

        Learns from its wait; raises Overloaded if the first token would come later than allowed.
        """
        predicted_s = self._predictor.trusted_s(predicted_s)
        if now_s > estimate.entered_s and not estimate.is_again:
            self._drain.started(estimate.item.num_tokens, now_s)
            at_worker_s = max(0.0, predicted_s - estimate.own_s) if predicted_s is not None else 0.0
            self._learn(estimate, now_s - estimate.entered_s + at_worker_s)
        check_deadline(now_s, estimate.item.deadline_s, predicted_s, estimate.grace_s)

    def gave_up(self, estimate: Estimate, now_s: float) -> None:
        """Learns from a request whose wait was abandoned."""
        self._learn(estimate, now_s - estimate.entered_s)

    def _wait_s(self, now_s: float, pool: Pool, ahead: Work) -> float:
        """The longer of two: the workers compute all that is queued, or the queue drains at its measured rate."""
        by_workers_s = self._predictor.wait_s(ahead, pool) or 0.0
        return max(by_workers_s, self._drain.wait_s(ahead.tokens, now_s)) if ahead.tokens else by_workers_s

    def _learn(self, estimate: Estimate, waited_s: float) -> None:
        """Requests close to their deadline weigh most, by the square: with time to spare, a few milliseconds may be
        many times the predicted wait and mean little, and many such would outweigh those that were nearly late.

        And the less, the more waits were open: what a change of the factor does is seen only when they have ended. With
        full steps the factor of a large fleet would fall by a quarter in that time, admit too many, and rise again."""
        slack_s = estimate.latest_start_s - estimate.entered_s
        if math.isinf(slack_s) or estimate.wait_s <= 0 or estimate.is_again:
            return
        longer_s = max(waited_s, estimate.wait_s * self.calibration.factor)
        weight = min(1.0, longer_s / max(slack_s, 1e-9)) ** 2 / max(1.0, estimate.num_open / OPEN)
        self.calibration.observe(estimate.wait_s, waited_s, weight)


def _ahead(queue: AdmissionQueue[Any], item: QueueEntry) -> Work:
    """What will be computed before the entry; each token of it with as many pairs as one that waits has in the mean."""
    num_tokens = queue.num_tokens_ahead(item)
    return Work(num_tokens, num_tokens * queue.num_pairs / max(1, queue.num_tokens))
