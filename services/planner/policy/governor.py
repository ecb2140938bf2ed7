"""When a pool may change its size: at once upwards, slowly downwards, and not to and fro."""

from __future__ import annotations

from collections import deque

from services.planner.policy.config import PlannerConfig, PoolLimits

_SURE = 3.0
"""Standard deviations by which a request rate must be below another to be surely less."""
_LEARNING_S = 1800.0
"""Time in which the planner learns what a request is: the size that it chose first may turn out too large."""


class Governor:
    """The hysteresis of one pool.

    Upwards it follows the need, once a part of the band beyond the size. Downwards it follows the largest of the needs,
    each with some spare demand, of the last `down_window_s`, and after `_LEARNING_S` only where the request rate has
    surely fallen since the pool grew: at constant load noise may show that fewer workers would do, which is no reason
    to give one back and to need it again. Two changes of direction are at least `direction_s` apart.
    """

    def __init__(self, config: PlannerConfig, limits: PoolLimits) -> None:
        self._config, self._limits = config, limits
        self._spare_needs: deque[tuple[float, int]] = deque()
        self._began_s: float | None = None
        self._direction = 0
        self._turned_s: float | None = None
        self._sure_rate = 0.0  # a request rate that there surely was since the pool last grew

    def propose(
        self, now_s: float, size: int, firm_need: int, need: int, spare_need: int, rate: float, rate_noise: float
    ) -> tuple[int, str]:
        """The size to have, and what held it back (empty: nothing). Changes nothing until `moved`.

        `need` is for the demand as it is, `firm_need` for a little less, `spare_need` for the band on top: noise within
        the band moves nothing. `rate`: requests/s now, with its standard deviation at constant load.
        """
        self._sure_rate = max(self._sure_rate, rate - _SURE * rate_noise)
        window_s = self._config.down_window_s
        self._began_s = now_s if self._began_s is None else self._began_s
        self._spare_needs.append((now_s, spare_need))
        while self._spare_needs[0][0] < now_s - window_s:
            self._spare_needs.popleft()
        need, spare_need = self._within(need), self._within(max(count for _, count in self._spare_needs))
        wanted, held = size, ""
        if self._within(firm_need) > size:
            wanted = need
        elif spare_need < size:
            wanted = spare_need
            if now_s - self._began_s < window_s:
                wanted, held = size, f"watched for less than {window_s:g} s"
            elif rate >= self._sure_rate and now_s - self._began_s >= _LEARNING_S:
                wanted, held = size, "the load has not fallen since the pool grew"
        if wanted != size and not self._may_turn(now_s, 1 if wanted > size else -1):
            wanted, held = size, f"turned less than {self._config.direction_s:g} s ago"
        return wanted, held

    def moved(self, now_s: float, change: int) -> None:
        """The pool's size was changed by that many workers."""
        direction = (change > 0) - (change < 0)
        if direction and direction != self._direction:
            if self._direction:
                self._turned_s = now_s
            self._direction = direction
        if direction > 0:
            self._sure_rate = 0.0

    def may_shrink(self, now_s: float) -> bool:
        """Whether shrinking now would not be a second change of direction too early."""
        return self._may_turn(now_s, -1)

    def _may_turn(self, now_s: float, direction: int) -> bool:
        if self._direction in (0, direction) or self._turned_s is None:
            return True
        return now_s - self._turned_s >= self._config.direction_s

    def _within(self, count: int) -> int:
        return max(self._limits.min_workers, min(self._limits.max_workers, count))
