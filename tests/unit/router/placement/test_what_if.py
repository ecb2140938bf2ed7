"""Splits and sizes are judged by the model by which the controller decides."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.demand import Mix
from services.router.placement.split import SplitController
from services.router.placement.views import Work
from services.router.placement.what_if import Targets, headrooms, pool_headroom, workers_needed
from tests.unit.router.placement.test_split import FAST, GROUPS, TPOT_S, fleet, told

TARGETS = Targets(TPOT_S, 2.0)


def mix(prompt: int = 1000, output: float = 300.0, rate: float = 20.0, cached: int = 0) -> Mix:
    return Mix(rate, Work.of(prompt - cached, cached), prompt, output)


def test_the_best_split_of_a_mix_is_what_the_controller_chooses_for_it():
    views = fleet(16)
    controller = SplitController(TPOT_S, 2.0)
    now_s = told(controller, 4000, 64, 20.0, 0.0, 200.0)
    chosen = controller.decodes(views, GROUPS, now_s)
    found = headrooms(views, mix(4000, 64, 20.0), TARGETS, GROUPS)
    assert set(found) == set(range(1, 17))
    assert found[len(chosen)] == pytest.approx(max(found.values()), rel=0.05)
    assert found[len(chosen)] == pytest.approx(controller.split.headroom, rel=0.1)


def test_asking_decides_nothing():
    controller, views = SplitController(TPOT_S), fleet(16)
    now_s = told(controller, 4000, 64, 20.0, 0.0)
    before = controller.split
    assert controller.headrooms(views, GROUPS, now_s)
    assert controller.split is before


def test_answers_that_run_just_now_say_nothing_about_a_window():
    busy = fleet(4, num_decoding=200)
    assert headrooms(busy, mix(), TARGETS, GROUPS) == headrooms(fleet(4), mix(), TARGETS, GROUPS)


def test_nothing_is_told_without_steps_without_a_target_or_where_no_answer_meets_it():
    assert headrooms(fleet(4, times=None), mix(), TARGETS, GROUPS) == {}
    assert headrooms(fleet(4), mix(), Targets(math.inf), GROUPS) == {}
    assert headrooms(fleet(4), mix(), Targets(0.001), GROUPS) == {}
    assert pool_headroom(fleet(1)[0], 4, mix(), Targets(0.001), GROUPS) == 0.0


@given(
    st.integers(1, 4000), st.floats(1, 1000), st.floats(0.1, 300), st.floats(0, 1), st.floats(0.01, 0.1),
    st.floats(1, 3),
)  # fmt: skip
def test_the_workers_needed_are_the_fewest_that_have_the_headroom(prompt, output, rate, cached, tpot_s, wanted):
    asked, targets, (worker,) = mix(prompt, output, rate, int(cached * (prompt - 1))), Targets(tpot_s, 2.0), fleet(1)
    count = workers_needed(worker, asked, targets, GROUPS, wanted, most=40)
    if count < 40:
        assert pool_headroom(worker, count, asked, targets, GROUPS) >= wanted
    if count > 1:
        assert pool_headroom(worker, count - 1, asked, targets, GROUPS) < wanted


@given(st.integers(1, 4000), st.floats(1, 1000), st.floats(0.1, 300), st.integers(1, 30), st.floats(0, 1))
def test_a_worker_more_is_never_worse(prompt, output, rate, size, overlap):
    (worker,) = fleet(1, FAST.__class__(0.5e-3, 6e-3, 27e-6, 0.0, 50e-9, 1e-9, overlap=overlap))
    asked = mix(prompt, output, rate)
    fewer, more = (pool_headroom(worker, count, asked, TARGETS, GROUPS) for count in (size, size + 1))
    assert more >= fewer * 0.999


def test_twice_the_demand_takes_about_twice_the_workers():
    (worker,) = fleet(1)
    once, twice = (workers_needed(worker, mix(rate=rate), TARGETS, GROUPS, 1.2, most=200) for rate in (40.0, 80.0))
    assert 2 * once - 2 <= twice <= 2 * once + 2
