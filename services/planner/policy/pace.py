"""How the time per output token grows with a decode worker's batch: by the step times that workers have fitted, or a
line, learnt as the load moves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.planner.policy.config import PlannerConfig
from shared.sizing.step_time import StepTimes

_MEMORY_S = 3600.0
"""Time constant after which what was seen counts less: prompts may have become longer."""
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
        """Of a decode step of that many sequences, in the mean of the workers that report theirs; of a fraction, in the
        mean of the numbers on both sides."""
        low = max(1, math.floor(batch))
        share = max(0.0, batch - low)
        found = [
            (1 - share) * times.decode_step_s(low, round(low * self._context))
            + share * times.decode_step_s(low + 1, round((low + 1) * self._context))
            for times in self._steps
        ]
        return sum(found) / len(found)
