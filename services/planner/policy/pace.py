"""How the time per output token grows with a decode worker's batch: a line, learnt as the load moves."""

from __future__ import annotations

import math

from services.planner.policy.config import PlannerConfig

_MEMORY_S = 3600.0
"""Time constant after which what was seen counts less: prompts may have become longer."""
_PRIOR_SAMPLES = 100.0
_PRIOR_BATCH = 10.0
"""Weight of the configured capacity in the line's slope, as a number of requests this far from the mean batch."""


class DecodePace:
    """Least squares over (batch, TPOT), weighted by finished requests.

    As long as the batch has hardly changed the data say nothing of the slope: it is the one by which TPOT reaches its
    target at the configured number of sequences.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._weight = 0.0
        self._batch = self._tpot_s = 0.0  # means
        self._spread = self._product = 0.0  # sums of squares and of products about them

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

    def at(self, batch: float) -> float:
        """TPOT at that many sequences a worker, seconds; the target while nothing has been seen."""
        config = self._config
        if not self._weight:
            return config.tpot_s
        distance = config.decode_sequences - self._batch
        configured = max(0.0, (config.tpot_s - self._tpot_s) / distance) if distance > 0 else 0.0
        prior = _PRIOR_SAMPLES * _PRIOR_BATCH**2
        slope = max(0.0, (self._product + prior * configured) / (self._spread + prior))
        return max(self._tpot_s / 2, self._tpot_s + slope * (batch - self._batch))
