"""How many workers each pool needs for a demand, and what the observed latencies correct in that."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.planner.policy.config import PlannerConfig
from services.planner.policy.demand import Demand
from services.planner.policy.observation import Observation
from shared.sizing.queueing import servers_needed

_RAISE = 1.1
"""Factor by which a correction grows where too many requests were late."""
_LEARN = 0.2
"""Weight of one observation of a decode worker's capacity."""
_OTHER_LOAD = 0.25
"""A correction is looked at again once the rate has moved by this share."""
_MAX_CORRECTION = 2.0
_MIN_SAMPLES = 100
"""Fewer requests than this tell nothing of a share."""
_SIGNIFICANT = 1.0
"""Standard deviations by which a share must be beyond its limit."""


@dataclass(frozen=True, slots=True)
class Need:
    """Workers of one pool, and why."""

    workers: int
    reason: str


class PrefillNeed:
    """Erlang's formula over the forecast load; observed late requests raise a correction of the load."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self.correction = 1.0
        self._corrected_rate = 0.0
        self._late = self._answered = 0.0
        self._quiet_until_s = -math.inf

    def observe(self, seen: Observation, demand: Demand) -> None:
        """Learns from a tick in which no worker was cold."""
        if self.correction > 1 and abs(demand.rate / max(self._corrected_rate, 1e-9) - 1) > _OTHER_LOAD:
            self.correction, self._corrected_rate = max(1.0, self.correction / _RAISE), demand.rate
        self._late += seen.num_late
        self._answered += seen.num_answered
        if self._answered < _MIN_SAMPLES or seen.now_s < self._quiet_until_s:
            return
        missed = _too_many(self._late, self._answered, 1 - self._config.attainment)
        self._late = self._answered = 0.0
        if missed:
            self.correction = min(_MAX_CORRECTION, self.correction * _RAISE)
            self._corrected_rate = demand.rate
            # What this brings is seen once a worker has started and the late requests of before are gone.
            self._quiet_until_s = seen.now_s + self._config.start_s + self._config.cold_start_s

    def forget(self) -> None:
        """Drops samples that a cold worker may have spoilt."""
        self._late = self._answered = 0.0

    def workers(self, demand: Demand, spare: float = 0.0) -> Need:
        """For the demand plus a share `spare` of it."""
        config = self._config
        load = demand.prefill_load * self.correction * (1 + spare)
        # The prompt's own time is part of its TTFT; long ones take more than the mean.
        wait_s = max(0.1 * config.ttft_s, config.ttft_s - 2 * demand.prefill_s)
        count = servers_needed(load, demand.prefill_s, wait_s, 1 - config.attainment, config.variation)
        return Need(
            count, f"{demand.rate:.2f} req/s keep {load:.2f} prefill workers busy (correction {self.correction:.2f})"
        )


class DecodeNeed:
    """Sequences over a worker's capacity, and blocks in use over its blocks; the larger of both."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self.capacity = config.decode_sequences
        """Sequences a worker within the TPOT target."""
        self._slow = self._finished = 0.0

    def observe(self, seen: Observation) -> None:
        """Learns the capacity: lower where TPOT was missed, back towards what was configured where it was met.

        Never beyond that: with fewer workers each step is slower, so more sequences run, and a capacity learnt from
        them would leave even fewer workers."""
        self._slow += seen.num_slow
        self._finished += seen.num_finished
        if self._finished < _MIN_SAMPLES:
            return
        missed = _too_many(self._slow, self._finished, 1 - self._config.attainment)
        self._slow = self._finished = 0.0
        batch = seen.num_sequences / max(1, seen.decode.num_ready)
        if missed:
            self.capacity += _LEARN * (max(1.0, min(self.capacity, batch) / _RAISE) - self.capacity)
        elif batch > self.capacity:
            self.capacity += _LEARN * (min(batch, self._config.decode_sequences) - self.capacity)

    def forget(self) -> None:
        """Drops samples that a cold worker may have spoilt."""
        self._slow = self._finished = 0.0

    def workers(self, demand: Demand, spare: float = 0.0) -> Need:
        """For the demand plus a share `spare` of it."""
        by_tpot = demand.sequences * (1 + spare) / self.capacity
        by_kv = demand.workers_by_kv * (1 + spare) / self._config.kv_share
        if by_kv > by_tpot:
            reason = f"their blocks fill {demand.workers_by_kv:.2f} decode workers"
        else:
            reason = f"{demand.sequences:.1f} sequences at {self.capacity:.1f} a decode worker"
        return Need(max(1, math.ceil(max(by_tpot, by_kv) - 1e-9)), reason)


def _too_many(count: float, samples: float, limit: float) -> bool:
    """Whether `count` of `samples` is a larger share than `limit`, and not by chance."""
    return count > limit * samples + _SIGNIFICANT * math.sqrt(limit * (1 - limit) * samples)
