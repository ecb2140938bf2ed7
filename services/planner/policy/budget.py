"""The GPU budget: which pair of sizes it allows, and which changes keep every moment within it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from services.planner.policy.config import PlannerConfig
from services.planner.policy.observation import PoolCount
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pair:
    """Workers of both pools. An elastic pool is `decode` beside no prefill workers."""

    prefill: int
    decode: int


def least(config: PlannerConfig) -> Pair:
    """The smallest sizes."""
    return Pair(0 if config.is_elastic else config.prefill.min_workers, config.decode.min_workers)


def check(config: PlannerConfig) -> None:
    """Raises ConfigError where the smallest pools are beyond the budget already, or a bound is not one."""
    pools = (
        (("auto", config.decode),) if config.is_elastic else (("prefill", config.prefill), ("decode", config.decode))
    )
    for name, limits in pools:
        if limits.min_workers > limits.max_workers:
            raise ConfigError(
                f"{name}.max_workers must be at least {name}.min_workers, {limits.min_workers}",
                field=f"{name}.max_workers",
                limit=limits.min_workers,
                value=limits.max_workers,
            )
    num_least = gpus(config, least(config))
    if num_least > config.gpu_budget:
        raise ConfigError(
            f"the smallest pools take {num_least} GPUs, gpu_budget is {config.gpu_budget}",
            field="gpu_budget",
            limit=num_least,
            value=config.gpu_budget,
        )


def gpus(config: PlannerConfig, pair: Pair) -> int:
    """GPUs of that many workers."""
    return pair.prefill * config.prefill.gpus_per_worker + pair.decode * config.decode.gpus_per_worker


def within(config: PlannerConfig, wanted: Pair) -> Pair:
    """The pair that the budget allows: all of it, else both pools above their least size get the same share.

    What is left over goes to the pool that got less of what it wanted.
    """
    if gpus(config, wanted) <= config.gpu_budget:
        return wanted
    low = least(config)
    more = Pair(max(0, wanted.prefill - low.prefill), max(0, wanted.decode - low.decode))
    share = Fraction(config.gpu_budget - gpus(config, low), gpus(config, more))
    got = Pair(low.prefill + int(more.prefill * share), low.decode + int(more.decode * share))
    while True:
        grown = [pair for pair in (_plus(got, 1, 0), _plus(got, 0, 1)) if _fits(config, pair, wanted)]
        if not grown:
            return got
        short_of_prefill = Fraction(got.prefill, max(1, wanted.prefill)) <= Fraction(got.decode, wanted.decode)
        got = next((pair for pair in grown if (pair.prefill > got.prefill) == short_of_prefill), grown[0])


def replicas_now(config: PlannerConfig, target: Pair, prefill: PoolCount, decode: PoolCount) -> Pair:
    """The replicas that may be asked for now on the way to `target`, never fewer than the present ones.

    Pools grow into what is free of the budget after everything that holds GPUs: replicas, pods beyond them, pods that
    end. So a change from one pool to the other waits for the first one's pods to be gone. Shrinking is no matter of the
    budget: see `Drain`.
    """
    free = config.gpu_budget - gpus(config, Pair(prefill.num_held, decode.num_held))
    now = Pair(prefill.replicas, decode.replicas)
    while True:
        fits = [
            (Fraction(size, max(1, goal)), pair, cost)
            for size, goal, pair, cost in (
                (now.prefill, target.prefill, _plus(now, 1, 0), config.prefill.gpus_per_worker),
                (now.decode, target.decode, _plus(now, 0, 1), config.decode.gpus_per_worker),
            )
            if size < goal and cost <= free
        ]
        if not fits:
            return now
        _, now, cost = min(fits, key=lambda item: item[0])  # first whichever is further from its goal
        free -= cost


def _plus(pair: Pair, prefill: int, decode: int) -> Pair:
    return Pair(pair.prefill + prefill, pair.decode + decode)


def _fits(config: PlannerConfig, pair: Pair, wanted: Pair) -> bool:
    inside = pair.prefill <= wanted.prefill and pair.decode <= wanted.decode
    return inside and gpus(config, pair) <= config.gpu_budget
