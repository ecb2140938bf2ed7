"""A pool gives nothing back at constant load, once the first half hour has shown what the requests are."""

from __future__ import annotations

import pytest

from services.planner.policy.config import PlannerConfig, PoolLimits
from services.planner.policy.planner import Governor

TICK_S = 10.0
NOISE = 0.1  # requests/s
SIZE, LESS = 3, 2


def size_after(rates: list[float], begin_s: float = 0.0, governor: Governor | None = None) -> int:
    """Of a pool of SIZE that needs LESS at every rate."""
    governor, size = governor or Governor(PlannerConfig(), PoolLimits()), SIZE
    for number, rate in enumerate(rates):
        now_s = begin_s + number * TICK_S
        wanted, _ = governor.propose(now_s, size, LESS, LESS, LESS, rate, NOISE)
        governor.moved(now_s, wanted - size)
        size = wanted
    return size


def grown() -> Governor:
    """Its pool has just grown to SIZE, an hour after the start."""
    governor = Governor(PlannerConfig(), PoolLimits())
    governor.propose(0.0, LESS, LESS, LESS, LESS, 2.0, NOISE)
    governor.moved(3600.0, SIZE - LESS)
    return governor


def test_a_size_of_the_first_minutes_is_corrected_at_the_same_load():
    assert size_after([2.0] * 60) == LESS


@pytest.mark.parametrize(("rates", "size"), [([2.0] * 300, SIZE), ([2.0] * 100 + [1.75] * 200, SIZE)])
def test_later_noise_gives_no_worker_back(rates, size):
    assert size_after(rates, 3600.0, grown()) == size


def test_a_load_that_has_surely_fallen_does():
    assert size_after([2.0] * 100 + [1.65] * 20, 3600.0, grown()) == LESS
