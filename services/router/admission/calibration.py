"""How far the predicted waits can be trusted: the quantile of observed over predicted, learnt from those that waited.

A predicted wait knows the tokens ahead and the time a token takes. It does not know what will overtake (other tenants,
other orders than arrival), that decode workers may prefill too, that other routers feed the same workers. All of that
shows in the waits observed, so what is refused at arrival is decided by predictions times a factor that is learnt.

The factor follows a quantile by stochastic approximation (Robbins and Monro, 1951) on a logarithmic scale: up by a step
times the quantile where a wait was longer than predicted, down by a step times the rest where it was not. So it forgets
exponentially, and keeps no history.
"""

from __future__ import annotations

import math

QUANTILE = 0.99
"""Of those let in, the share whose wait should be no longer than predicted."""
STEP = 0.1
"""Most that one observation moves the factor, on the logarithmic scale."""
MAX_FACTOR = 16.0
"""However wrong predictions were, a little queue is always let in, so that there is something to learn from."""


class WaitCalibration:
    """Learns from (predicted, observed) waits. Plain numbers, no clock."""

    def __init__(self, quantile: float = QUANTILE) -> None:
        """`quantile` in (0, 1): the share of waits that should be no longer than predicted."""
        self._quantile = quantile
        self._log = 0.0

    @property
    def factor(self) -> float:
        """By what a predicted wait is multiplied, between 1 / MAX_FACTOR and MAX_FACTOR; 1 before anything was seen."""
        return math.exp(self._log)

    def observe(self, predicted_s: float, observed_s: float, weight: float = 1.0) -> None:
        """One wait; `weight` in [0, 1] is how much it counts. One that was given up counts by its length until then."""
        if predicted_s <= 0:
            return
        longer = observed_s > predicted_s * self.factor
        move = self._quantile if longer else self._quantile - 1.0
        most = math.log(MAX_FACTOR)
        self._log = min(most, max(-most, self._log + STEP * weight * move))
