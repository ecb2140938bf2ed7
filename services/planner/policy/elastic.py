"""The size of one elastic pool, whose workers prefill and decode.

Which of them decode the routers decide, each second and by themselves (`services/router/placement/split.py`). By the
same model a number of workers is judged at its best split. So a mix that has changed moves preferences first; workers
are started or ended only where the best split of those that are there has too little headroom, or more than enough,
over the forecast for the time that a worker takes to start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.planner.policy import budget
from services.planner.policy.budget import Pair
from services.planner.policy.config import PlannerConfig
from services.planner.policy.demand import Demand, DemandModel
from services.planner.policy.need import Correction
from services.planner.policy.observation import Observation
from services.planner.policy.planner import Decision, Governor
from services.router.placement.demand import Mix
from services.router.placement.views import Work, WorkerView
from services.router.placement.what_if import Targets, pool_headroom, workers_needed


@dataclass(frozen=True, slots=True)
class Sizes:
    """Workers for a little less than the forecast, for it, and for the band on top; see `Governor`."""

    firm: int
    need: int
    spare: int


class RequestShape:
    """What a request is in the mean: sums that decay slowly, over finished ones."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._num_ended = self._prompt = self._cached = self._output = 0.0
        self._last_s: float | None = None

    def observe(self, seen: Observation) -> None:
        """Takes what finished since the observation before."""
        span_s = seen.now_s - self._last_s if self._last_s is not None else 0.0
        self._last_s = seen.now_s
        keep = math.exp(-span_s / self._config.work_smoothing_s)
        self._num_ended = keep * self._num_ended + seen.num_ended
        self._prompt = keep * self._prompt + seen.num_prompt_tokens
        self._cached = keep * self._cached + seen.num_cached_tokens
        self._output = keep * self._output + seen.num_output_tokens

    def mix(self, rate: float) -> Mix | None:
        """Finished requests a second; None before any has finished."""
        if self._num_ended < 1 or self._output <= 0:
            return None
        prompt, cached = (total / self._num_ended for total in (self._prompt, self._cached))
        num_uncached = max(1, round(prompt - cached))
        return Mix(rate, Work.of(num_uncached, round(cached)), max(1.0, prompt), self._output / self._num_ended)


class ElasticPlanner:
    """Decides; carries nothing out. Not thread-safe."""

    def __init__(self, config: PlannerConfig) -> None:
        """`config` is of an elastic pool. Raises ConfigError for limits that contradict each other."""
        budget.check(config)
        self._config = config
        self._demand, self._shape = DemandModel(config), RequestShape(config)
        self._correction = Correction(config)
        self._governor = Governor(config, config.decode)
        self._most = min(config.decode.max_workers, config.gpu_budget // config.decode.gpus_per_worker)
        self._target: Pair | None = None

    def decide(self, seen: Observation) -> Decision:
        """The size to have. Repeats the last one while too little is known."""
        before = self._target or Pair(0, seen.decode.num_staying)
        self._shape.observe(seen)
        demand = self._demand.observe(seen)
        if demand is None:
            return self._decided(seen.now_s, before, before.decode, "no figures yet")
        self._learn(seen, demand)
        worker = typical(seen.workers)
        rate = (demand.rate + seen.queue_len / self._config.recover_s) * self._correction.value
        mix = self._shape.mix(rate)
        if worker is None or mix is None:
            what = "no worker has reported what its steps take" if worker is None else "no request has finished"
            return self._decided(seen.now_s, before, before.decode, f"{what} yet")
        targets = Targets(self._config.tpot_s, self._config.ttft_s)
        if pool_headroom(worker, self._config.decode.max_workers, mix, targets, seen.groups) <= 0:
            why = "no number of workers meets the targets for such requests"
            return self._decided(seen.now_s, before, before.decode, why)
        sizes = self._sizes(worker, mix, targets, seen)
        wanted, held = self._governor.propose(
            seen.now_s, before.decode, sizes.firm, sizes.need, sizes.spare, demand.rate_now, demand.rate_noise
        )
        now = pool_headroom(worker, max(1, seen.decode.num_ready + seen.num_beside), mix, targets, seen.groups)
        beside = f" and {seen.num_beside} of other pools" if seen.num_beside else ""
        reason = (
            f"{mix.rate:.2f} req/s of {mix.prompt.tokens} tokens to compute and {mix.output_len:.0f} to answer "
            f"(correction {self._correction.value:.2f}): {seen.decode.num_ready} workers{beside}, split best, have "
            f"headroom {now:.2f}, {sizes.need} needed for {self._config.headroom:g}{f' ({held})' if held else ''}"
        )
        if wanted > self._most:
            reason += f"; wanted {wanted}, the budget is {self._config.gpu_budget} GPUs"
        return self._decided(seen.now_s, before, min(wanted, self._most), reason)

    def refused(self, decision: Decision) -> None:
        """The decision could not be carried out: the next one starts from the size before it."""
        self._target = decision.before

    def _learn(self, seen: Observation, demand: Demand) -> None:
        if seen.decode.num_cold:
            self._correction.forget()
        else:
            self._correction.observe(seen, demand.rate, seen.num_late + seen.num_slow, 0.0)

    def _sizes(self, worker: WorkerView, mix: Mix, targets: Targets, seen: Observation) -> Sizes:
        """What the workers of other pools, taken as no better and no worse, leave to do."""
        most, headroom, band = self._config.decode.max_workers, self._config.headroom, self._config.band
        beside = seen.num_beside
        firm, need, spare = (
            max(0, workers_needed(worker, mix, targets, seen.groups, headroom * share, most + beside) - beside)
            for share in (1 - band / 2, 1.0, 1 + band)
        )
        return Sizes(firm, need, spare)

    def _decided(self, now_s: float, before: Pair, size: int, reason: str) -> Decision:
        self._target = Pair(0, size)
        self._governor.moved(now_s, size - before.decode)
        return Decision(self._target, before, reason, is_elastic=True)


def typical(workers: Sequence[WorkerView]) -> WorkerView | None:
    """The worker in the middle by what reading the weights takes; None where no worker's steps are known."""
    known = sorted((one.times.read_s, one.name) for one in workers if one.times is not None)
    if not known:
        return None
    _, name = known[len(known) // 2]
    return next(one for one in workers if one.name == name)
