"""How far predicted waits can be trusted: a learnt quantile of observed over predicted wait.

A predicted wait knows the tokens ahead and the time a token takes. It does not know what will overtake (other tenants,
orders other than arrival), that decode workers may prefill too, or that other routers feed the same workers. All of
that shows in the observed waits. So the decision to refuse at arrival uses the prediction times a learnt factor.

The factor follows a quantile by stochastic approximation (Robbins and Monro, 1951) on a logarithmic scale: up by
step × quantile when a wait was longer than predicted, down by step × (1 − quantile) when it was not. It forgets
exponentially and keeps no history.
"""

from __future__ import annotations

import math

QUANTILE = 0.99
"""The share of admitted requests whose wait should be no longer than predicted."""
STEP = 0.1
"""Largest change by one observation, on the logarithmic scale."""
MAX_FACTOR = 16.0
"""Bounds the factor both ways: some requests always get in, so that there is something to learn from."""


class WaitCalibration:
    """Learns from (predicted, observed) waits. Plain numbers, no clock."""

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
