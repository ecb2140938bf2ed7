"""The planner over a simulated fleet: all requests end, the budget holds, workers drain before they go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.simulator.outcome import Targets
from loadtest.simulator.planning.clairvoyant import loads, schedule
from loadtest.simulator.planning.day import Day, day_trace
from loadtest.simulator.planning.elastic_pool import Lifecycle
from loadtest.simulator.planning.run import ElasticSetup, planned, scheduled
from services.planner.policy.budget import Pair
from services.planner.policy.config import PlannerConfig, PoolLimits
from tests.unit.loadtest.simulator.setups import setup, spec

DAY = Day(length_s=1800.0, mean_rate=0.8, prompt_len=8000.0, output_len=200.0)
LIMITS = PoolLimits(gpus_per_worker=4)


def elastic() -> ElasticSetup:
    fleet = setup()
    return ElasticSetup(spec(), 4, Targets(5.0, 0.05), fleet.tandem, Lifecycle(start_s=30.0, cold_s=10.0))


@pytest.mark.slow
def test_a_day_is_followed_within_the_budget_and_nothing_is_lost():
    trace = day_trace(replace(DAY, mean_rate=1.2), seed=1)  # at its height more than one prefill worker's
    config = PlannerConfig(
        prefill=LIMITS, decode=LIMITS, gpu_budget=20, ttft_s=5.0, tpot_s=0.05, start_s=30.0, direction_s=120.0
    )
    outcome = planned(trace, elastic(), Pair(1, 1), config)
    assert outcome.max_gpus <= 20
    assert outcome.attainment > 0.9
    assert all(request.refused or request.finished_s > request.at_s for request in outcome.requests)
    assert max(size for _, size in outcome.prefill_changes) > 1
    again = planned(trace, elastic(), Pair(1, 1), config)
    assert [str(decision) for _, decision in again.decisions] == [str(decision) for _, decision in outcome.decisions]


@pytest.mark.slow
def test_a_schedule_is_ready_when_its_window_begins_and_costs_what_it_holds():
    trace = day_trace(DAY, seed=2)
    fixed = scheduled(trace, elastic(), [(0.0, Pair(2, 1))])
    assert fixed.gpu_hours == pytest.approx(3 * 4 * trace[-1].at_s / 3600)
    plan = [(0.0, Pair(1, 1)), (600.0, Pair(3, 1))]
    grown = scheduled(trace, elastic(), plan)
    (_, first), (at_s, more) = grown.prefill_changes
    assert (first, more) == (1, 3)
    assert 600.0 - 30.0 - 10.0 <= at_s <= 600.0 - 30.0


def test_the_schedule_follows_the_load():
    windows = loads(day_trace(DAY, seed=3), spec(), 300.0, 0.02, 80.0)
    assert len(windows) == 6
    assert max(windows)[0] > 2 * min(windows)[0]
    plan = schedule([(0.4, 0.1), (1.4, 0.1), (1.5, 0.2), (0.2, 1.3)], 300.0, 1.0, 1.0)
    assert plan == [(0.0, Pair(1, 1)), (300.0, Pair(2, 1)), (900.0, Pair(1, 2))]
