"""The planner: one observation in, one decision about both pools out."""

from __future__ import annotations

from dataclasses import dataclass

from services.planner.policy import budget
from services.planner.policy.budget import Pair
from services.planner.policy.config import PlannerConfig
from services.planner.policy.demand import Demand, DemandModel
from services.planner.policy.governor import Governor
from services.planner.policy.need import DecodeNeed, PrefillNeed
from services.planner.policy.observation import Observation


@dataclass(frozen=True, slots=True)
class Decision:
    """Both pools' sizes, decided together, or that of an elastic one."""

    target: Pair
    before: Pair
    reason: str
    is_elastic: bool = False

    @property
    def changes(self) -> bool:
        """Whether it is another pair than before."""
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
        before = self._target or Pair(seen.prefill.replicas, seen.decode.replicas)
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
