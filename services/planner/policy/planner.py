"""The planner: one observation in, one decision about both pools out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.planner.policy import budget
from services.planner.policy.budget import Pair
from services.planner.policy.config import PlannerConfig, PoolLimits
from services.planner.policy.demand import Demand, DemandModel
from services.planner.policy.need import DecodeNeed, PrefillNeed
from services.planner.policy.observation import Observation

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


@dataclass(frozen=True, slots=True)
class Decision:
    """Both pools' sizes, decided together, or that of an elastic one."""

    target: Pair
    before: Pair
    reason: str
    is_elastic: bool = False

    @property
    def changes(self) -> bool:
        """Whether the target sizes of the pools differ from the present ones."""
        return self.target != self.before

    @property
    def sizes(self) -> tuple[tuple[str, int, int], ...]:
        """(role, workers before, workers to have) of each pool."""
        if self.is_elastic:
            return (("auto", self.before.decode, self.target.decode),)
        return (
            ("prefill", self.before.prefill, self.target.prefill),
            ("decode", self.before.decode, self.target.decode),
        )

    def __str__(self) -> str:
        moves = [
            f"{name} {now} → {then}" if now != then else f"{name} stays at {now}" for name, now, then in self.sizes
        ]
        return f"{', '.join(moves)}: {self.reason}"


class Planner:
    """Decides; carries nothing out. Not thread-safe. The same class serves the service and the simulator."""

    def __init__(self, config: PlannerConfig) -> None:
        """Raises ConfigError for limits that contradict each other."""
        budget.check(config)
        self._config = config
        self._demand = DemandModel(config)
        self._prefill, self._decode = PrefillNeed(config), DecodeNeed(config)
        self._governors = Governor(config, config.prefill), Governor(config, config.decode)
        self._target: Pair | None = None

    def decide(self, seen: Observation) -> Decision:
        """The pair to have. Repeats the last one while too little is known."""
        before = self._target or Pair(seen.prefill.num_staying, seen.decode.num_staying)
        demand = self._demand.observe(seen)
        if demand is None:
            return self._decided(seen.now_s, before, budget.within(self._config, before), "no figures yet")
        self._learn(seen, demand)
        wanted, reasons = self._wanted(seen.now_s, before, demand)
        allowed = self._allowed(seen.now_s, before, wanted)
        if allowed != wanted:
            reasons.append(f"wanted {wanted.prefill} + {wanted.decode}, the budget is {self._config.gpu_budget} GPUs")
        return self._decided(seen.now_s, before, allowed, "; ".join(reasons))

    def refused(self, decision: Decision) -> None:
        """The decision could not be carried out: the next one starts from the sizes before it."""
        self._target = decision.before

    def _learn(self, seen: Observation, demand: Demand) -> None:
        if seen.prefill.num_cold or seen.decode.num_cold:
            self._prefill.forget()
            self._decode.forget(seen)
            return
        self._prefill.observe(seen, demand)
        self._decode.observe(seen)

    def _wanted(self, now_s: float, before: Pair, demand: Demand) -> tuple[Pair, list[str]]:
        sizes, reasons = [], []
        models: tuple[PrefillNeed | DecodeNeed, ...] = (self._prefill, self._decode)
        for governor, model, size in zip(self._governors, models, (before.prefill, before.decode), strict=True):
            need = model.workers(demand)
            firm, spare = model.workers(demand, -self._config.band / 2), model.workers(demand, self._config.band)
            wanted, held = governor.propose(
                now_s, size, firm.workers, need.workers, spare.workers, demand.rate_now, demand.rate_noise
            )
            sizes.append(wanted)
            reasons.append(f"{need.reason}, {need.workers} needed{f' ({held})' if held else ''}")
        return Pair(*sizes), reasons

    def _allowed(self, now_s: float, before: Pair, wanted: Pair) -> Pair:
        """`wanted` within the budget. A pool that may not turn now keeps its size, and so the other one's gain."""
        got = budget.within(self._config, wanted)
        prefill, decode = self._governors
        if got.prefill < before.prefill and not prefill.may_shrink(now_s):
            got = Pair(before.prefill, min(got.decode, before.decode))
        if got.decode < before.decode and not decode.may_shrink(now_s):
            got = Pair(min(got.prefill, before.prefill), before.decode)
        return got

    def _decided(self, now_s: float, before: Pair, target: Pair, reason: str) -> Decision:
        self._target = target
        for governor, change in zip(
            self._governors, (target.prefill - before.prefill, target.decode - before.decode), strict=True
        ):
            governor.moved(now_s, change)
        return Decision(target, before, reason)
