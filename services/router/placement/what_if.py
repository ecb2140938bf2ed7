"""Which split of a fleet, or which size of it, would suit a given mix of requests: the controller's own model over a
demand that does not change. Pure policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.router.placement.demand import Mix, SteadyDemand
from services.router.placement.split import SplitController
from services.router.placement.views import WorkerView
from shared.kv.groups import KVGroups


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of every request, seconds; infinite: none."""

    tpot_s: float
    ttft_s: float = math.inf


def headrooms(
    views: Sequence[WorkerView],
    mix: Mix,
    targets: Targets,
    groups: KVGroups,
    *,
    apart: bool = False,
    present: int | None = None,
) -> dict[int, float]:
    """How many times the mix the workers could serve, by how many of them decode, `present` among these; empty where
    nothing is known. With `apart` those compute no prompts, as in two pools."""
    controller = SplitController(targets.tpot_s, targets.ttft_s, SteadyDemand(mix), apart=apart)
    return controller.headrooms([replace(view, num_decoding=0) for view in views], groups, 0.0, present)


def pool_headroom(worker: WorkerView, size: int, mix: Mix, targets: Targets, groups: KVGroups) -> float:
    """The most that `size` workers like this one could serve, in any split, in times of the mix; 0 where they cannot
    serve it within the targets at all."""
    pool = [replace(worker, name=f"{number}") for number in range(size)]
    return max(headrooms(pool, mix, targets, groups).values(), default=0.0)


def workers_needed(worker: WorkerView, mix: Mix, targets: Targets, groups: KVGroups, headroom: float, most: int) -> int:
    """The fewest workers like this one with at least that headroom; `most` where no fewer have it."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if pool_headroom(worker, middle, mix, targets, groups) >= headroom:
            high = middle
        else:
            low = middle + 1
    return low
