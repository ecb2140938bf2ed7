"""How many workers each pool needs for a demand, and what the observed latencies correct in that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.planner.policy.config import PlannerConfig
from services.planner.policy.demand import Demand
from services.planner.policy.observation import Observation
from shared.sizing.queueing import mean_wait_s, servers_needed
from shared.sizing.step_time import StepTimes

_MEMORY_S = 3600.0
"""Time constant after which what was seen counts less: prompts may have become longer."""
_PRIOR = 10.0
"""Weight of the configured variation, as a number of service times of expected waiting."""
_MOST = 10.0
_STEP = 1.3
"""Factor by which the waits must have changed before another value is used."""
_MAX_LOAD = 0.9
"""Load beyond which a pool's mean wait says nothing, since it has not settled."""


class PromptVariation:
    """Observed waits over those that the formula gives for equal shares: their ratio is (1 + variation) / 2.

    What else makes requests wait is in it as well, such as a placement that prefers a cached prefix to a free worker.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self._configured = config.variation
        self._expected = self._waited = 0.0  # service times
        self.value = config.variation
        """Squared coefficient of variation. It follows what is learnt in steps: noise in it moves no pool."""

    def observe(self, waited_s: float, count: int, workers: int, load: float, service_s: float, span_s: float) -> None:
        """`count` requests waited `waited_s` in all; `load` of `workers` were busy, `service_s` for each request."""
        keep = math.exp(-span_s / _MEMORY_S)
        self._expected, self._waited = keep * self._expected, keep * self._waited
        if service_s <= 0 or load > _MAX_LOAD * workers:
            return
        self._expected += count * mean_wait_s(workers, load, service_s, 1.0) / service_s
        self._waited += waited_s / service_s
        learnt = self._learnt()
        if not 1 / _STEP < (1 + learnt) / (1 + self.value) < _STEP:
            self.value = learnt

    def _learnt(self) -> float:
        expected = self._expected + _PRIOR
        waited = self._waited + _PRIOR * (1 + self._configured) / 2
        return max(0.0, min(_MOST, 2 * waited / expected - 1))


_PRIOR_SAMPLES = 100.0
_PRIOR_BATCH = 10.0
"""Weight of the configured capacity in the line's slope, as a number of requests this far from the mean batch."""


class DecodePace:
    """Least squares over (batch, TPOT), weighted by finished requests.

    As long as the batch has hardly changed the data say nothing of the slope: it is that of the steps that the workers
    have measured, or, where none reports them, the one by which TPOT reaches its target at the configured number of
    sequences.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._weight = 0.0
        self._batch = self._tpot_s = 0.0  # means
        self._spread = self._product = 0.0  # sums of squares and of products about them
        self._steps: Sequence[StepTimes] = ()
        self._context = 0.0

    def observe(self, batch: float, tpot_s: float, count: int, span_s: float) -> None:
        """`count` requests finished in the last `span_s` with that mean TPOT, at that many sequences a worker."""
        keep = math.exp(-span_s / _MEMORY_S)
        self._weight, self._spread, self._product = keep * self._weight, keep * self._spread, keep * self._product
        if not count:
            return
        self._weight += count
        more_batch, more_s = batch - self._batch, tpot_s - self._tpot_s
        self._batch += count / self._weight * more_batch
        self._tpot_s += count / self._weight * more_s
        self._spread += count * more_batch * (batch - self._batch)
        self._product += count * more_batch * (tpot_s - self._tpot_s)

    def measured(self, steps: Sequence[StepTimes], context: float) -> None:
        """What the decode workers have fitted to their steps, and the mean tokens of a sequence on them; nothing is
        forgotten where none of them reports any."""
        if steps:
            self._steps, self._context = steps, context or self._context

    def at(self, batch: float) -> float:
        """TPOT at that many sequences a worker, seconds; the target while nothing has been seen."""
        config = self._config
        if not self._weight:
            return config.tpot_s
        if self._steps:
            return max(self._tpot_s / 2, self._tpot_s + self._step_s(batch) - self._step_s(self._batch))
        distance = config.decode_sequences - self._batch
        configured = max(0.0, (config.tpot_s - self._tpot_s) / distance) if distance > 0 else 0.0
        prior = _PRIOR_SAMPLES * _PRIOR_BATCH**2
        slope = max(0.0, (self._product + prior * configured) / (self._spread + prior))
        return max(self._tpot_s / 2, self._tpot_s + slope * (batch - self._batch))

    def _step_s(self, batch: float) -> float:
        """Time of a decode step of that many sequences: the mean over the workers that report theirs, and for a
        fraction between the numbers on both sides."""
        low = max(1, math.floor(batch))
        share = max(0.0, batch - low)
        found = [
            (1 - share) * times.decode_step_s(low, round(low * self._context))
            + share * times.decode_step_s(low + 1, round((low + 1) * self._context))
            for times in self._steps
        ]
        return sum(found) / len(found)


_RAISE = 1.1
"""Factor by which a correction grows where too many requests were late."""
_LEARN = 0.2
"""Weight of one observation of a decode worker's capacity."""
_OTHER_LOAD = 0.25
"""A correction is looked at again once the rate has moved by this share."""
_MAX_CORRECTION = 2.0
_AT_THE_EDGE = 3.0
"""A size that just suffices may miss the goal by this factor for the moment: workers are whole and the load moves, so
that most of the time fewer are late. Where too many are all the same, the correction grows."""
_PEAK_S = 300.0
"""Time constant in which a large batch is forgotten: requests that were in it end."""
_MIN_SAMPLES = 100
"""Fewer requests than this tell nothing of a share."""
_JUDGED_S = 120.0
_AIM = 0.8
"""Part of the allowed share at which a pool is corrected: what was missed until that helps counts too."""
_SIGNIFICANT, _OBVIOUS = 0.5, 4.0
"""Standard deviations by which a share must be beyond its limit after `_JUDGED_S`, and before."""


@dataclass(frozen=True, slots=True)
class Need:
    """Workers of one pool, and why."""

    workers: int
    reason: str


class Correction:
    """A factor on the load that grows while more requests than the goal allows miss their target, and that is looked at
    again where the load has become another."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self.value = 1.0
        self._corrected_rate = 0.0
        self._missed = MissedShare(1 - config.attainment)
        self._quiet_until_s = -math.inf

    def observe(self, seen: Observation, rate: float, missed: float, others: float) -> None:
        """Takes a tick in which no worker was cold; `others` missed a target that this pool is not to blame for."""
        if self.value > 1 and abs(rate / max(self._corrected_rate, 1e-9) - 1) > _OTHER_LOAD:
            self.value, self._corrected_rate = max(1.0, self.value / _RAISE), rate
        if seen.now_s < self._quiet_until_s:
            self._missed.forget()
        elif self._missed.observe(seen.now_s, missed, others, seen.num_answered):
            self.value = min(_MAX_CORRECTION, self.value * _RAISE)
            self._corrected_rate = rate
            # What this brings is seen once a worker has started and the late requests of before are gone.
            self._quiet_until_s = seen.now_s + self._config.start_s + self._config.cold_start_s

    def forget(self) -> None:
        """Drops samples that a cold worker may have spoilt."""
        self._missed.forget()


class PrefillNeed:
    """Erlang's formula over the forecast load; observed late requests raise a correction of the load."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._variation = PromptVariation(config)
        self._correction = Correction(config)
        self._last_s: float | None = None

    def observe(self, seen: Observation, demand: Demand) -> None:
        """Learns from a tick in which no worker was cold."""
        self._observe_waits(seen, demand)
        self._correction.observe(seen, demand.rate, seen.num_late, seen.num_slow)

    def forget(self) -> None:
        """Drops samples that a cold worker may have spoilt."""
        self._correction.forget()

    def workers(self, demand: Demand, spare: float = 0.0) -> Need:
        """The number of workers for the demand plus a share `spare` of it."""
        config = self._config
        load = demand.prefill_load * self._correction.value * (1 + spare)
        # The prompt's own time is part of its TTFT; long ones take more than the mean.
        wait_s = max(0.1 * config.ttft_s, config.ttft_s - 2 * demand.prefill_s)
        late = min(0.5, _AT_THE_EDGE * (1 - config.attainment))
        count = servers_needed(load, demand.prefill_s, wait_s, late, self._variation.value)
        return Need(
            count,
            f"{demand.rate:.2f} req/s keep {load:.2f} prefill workers busy "
            f"(correction {self._correction.value:.2f}, variation {self._variation.value:.1f})",
        )

    def _observe_waits(self, seen: Observation, demand: Demand) -> None:
        span_s, self._last_s = _span_s(self._last_s, seen.now_s), seen.now_s
        waited_s = seen.ttft_sum_s - seen.num_answered * demand.prefill_s
        load = demand.rate_now * demand.prefill_s
        self._variation.observe(waited_s, seen.num_answered, seen.prefill.num_ready, load, demand.prefill_s, span_s)


class DecodeNeed:
    """Sequences over a worker's capacity: what its TPOT allows, or its blocks, whichever is less.

    In a larger batch each step is slower and sequences stay longer. So the demand is that of workers filled to their
    capacity: a pool that is half empty and so answers fast is not taken for one with less to do, and does not shrink
    into a size that it would have to leave again.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._pace = DecodePace(config)
        self.capacity = config.decode_sequences
        """Sequences a worker within the TPOT target."""
        self._slow = MissedShare(1 - config.attainment)
        self._peak = 0.0  # largest batch of the last minutes: that of the requests that end now
        self._last_s: float | None = None

    def observe(self, seen: Observation) -> None:
        """Learns the pace, and the capacity: lower where TPOT was missed, back towards what was configured where it
        was met.

        Never beyond that: with fewer workers each step is slower, so more sequences run, and a capacity learnt from
        them would leave even fewer workers.
        """
        batch, span_s = self._note_batch(seen)
        self._pace.measured(seen.decode_steps, seen.decode_context)
        self._pace.observe(batch, seen.tpot_sum_s / max(1, seen.num_finished), seen.num_finished, span_s)
        missed = self._slow.observe(seen.now_s, seen.num_slow, seen.num_late, seen.num_finished)
        if missed:
            # Requests that were slow in larger batches than this capacity say nothing against it.
            self.capacity += _LEARN * (max(1.0, min(self.capacity, self._peak / _RAISE)) - self.capacity)
        elif missed is False and batch > self.capacity:
            self.capacity += _LEARN * (min(batch, self._config.decode_sequences) - self.capacity)

    def forget(self, seen: Observation) -> None:
        """Drops samples that a cold worker may have spoilt."""
        self._note_batch(seen)
        self._slow.forget()

    def workers(self, demand: Demand, spare: float = 0.0) -> Need:
        """The number of workers for the demand plus a share `spare` of it."""
        by_kv = self._config.kv_share * demand.sequences / max(demand.workers_by_kv, 1e-9)
        capacity = min(self.capacity, by_kv) if demand.workers_by_kv > 0 else self.capacity
        longer = self._pace.at(capacity) / demand.tpot_s if demand.tpot_s > 0 else 1.0
        sequences = demand.sequences * longer
        count = max(1, math.ceil(sequences * (1 + spare) / max(capacity, 1e-9) - 1e-9))
        limit = "for which its blocks suffice" if capacity < self.capacity else "within the TPOT target"
        return Need(count, f"{sequences:.1f} sequences at {capacity:.1f} a decode worker, {limit}")

    def _note_batch(self, seen: Observation) -> tuple[float, float]:
        """Sequences a worker, and seconds since the call before."""
        batch = seen.num_sequences / max(1, seen.decode.num_ready)
        span_s, self._last_s = _span_s(self._last_s, seen.now_s), seen.now_s
        self._peak = max(batch, batch + (self._peak - batch) * math.exp(-span_s / _PEAK_S))
        return batch, span_s


class MissedShare:
    """Whether more requests than the goal allows missed a target, judged when enough of them have been seen.

    The goal is one for both targets, so what missed the other one counts too; the pool is to blame for the larger part.
    At once where the share is far beyond the limit, otherwise over `_JUDGED_S`: requests are late in bursts, and a goal
    that holds over hours is not missed because of one.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._began_s: float | None = None
        self._missed = self._others = self._samples = 0.0

    def observe(self, now_s: float, missed: float, others: float, samples: float) -> bool | None:
        """`others` missed the other target. None: not known yet. After an answer it begins anew."""
        self._began_s = now_s if self._began_s is None else self._began_s
        self._missed += missed
        self._others += others
        self._samples += samples
        if self._samples < _MIN_SAMPLES:
            return None
        is_over = now_s - self._began_s >= _JUDGED_S
        answer = self._is_beyond(_SIGNIFICANT if is_over else _OBVIOUS)
        if not answer and not is_over:
            return None
        self.forget()
        return answer

    def forget(self) -> None:
        """Begins anew."""
        self._began_s = None
        self._missed = self._others = self._samples = 0.0

    def _is_beyond(self, deviations: float) -> bool:
        limit = _AIM * self._limit
        noise = math.sqrt(limit * (1 - limit) * self._samples)
        beyond = self._missed + self._others > limit * self._samples + deviations * noise
        return beyond and self._missed >= self._others


def _span_s(last_s: float | None, now_s: float) -> float:
    return now_s - last_s if last_s is not None else 0.0
