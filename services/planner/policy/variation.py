"""How unequal prompts and bursty arrivals are, learnt from how long requests wait."""

from __future__ import annotations

import math

from services.planner.policy.config import PlannerConfig
from shared.sizing.queueing import mean_wait_s

_MEMORY_S = 3600.0
"""Time constant after which what was seen counts less."""
_PRIOR = 10.0
"""Weight of the configured variation, as a number of service times of expected waiting."""
_MOST = 10.0
_STEP = 1.3
"""Factor by which the waits must have changed before another value is used."""
_MAX_LOAD = 0.9
"""Of a busier pool the mean wait says nothing: it has not settled."""


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
