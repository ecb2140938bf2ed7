"""The time per output token at another batch than the one that was seen."""

from __future__ import annotations

import pytest

from services.planner.policy.config import PlannerConfig
from services.planner.policy.need import DecodePace
from shared.sizing.step_time import StepTimes

CONFIG = PlannerConfig(tpot_s=0.05, decode_sequences=20.0)
STEPS = StepTimes(3e-3, 4e-3, 0.4e-3, 0.2e-3, 1e-6, 0.1e-6)


def seen_at(batch: float, tpot_s: float, *steps: StepTimes) -> DecodePace:
    pace = DecodePace(CONFIG)
    pace.observe(batch, tpot_s, 1000, 10.0)
    pace.measured(steps, 500.0)
    return pace


def test_without_reported_steps_the_target_is_reached_at_the_configured_number():
    pace = seen_at(10, 0.030)
    assert [pace.at(batch) for batch in (10, 15, 20)] == pytest.approx([0.030, 0.040, 0.050])


def test_reported_steps_say_how_much_longer_a_step_of_a_larger_batch_is():
    pace = seen_at(8, 0.012, STEPS)
    longer = STEPS.decode_step_s(32, 32 * 500) - STEPS.decode_step_s(8, 8 * 500)
    assert pace.at(8) == pytest.approx(0.012)
    assert pace.at(32) == pytest.approx(0.012 + longer)
    assert pace.at(31) < pace.at(31.5) < pace.at(32)
    assert pace.at(0.5) >= 0.006, "no less than half of what was seen"


def test_workers_that_differ_count_in_the_mean_and_reports_that_stop_are_kept():
    slow = StepTimes(3e-3, 4e-3, 0.4e-3, 1.2e-3, 1e-6, 0.1e-6)
    alone = [seen_at(8, 0.012, steps).at(24) for steps in (STEPS, slow)]
    both = seen_at(8, 0.012, STEPS, slow)
    assert both.at(24) == pytest.approx(sum(alone) / 2)
    both.measured((), 0.0)
    assert both.at(24) == pytest.approx(sum(alone) / 2)
