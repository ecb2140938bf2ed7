"""Simulated adapters: loads take their time and their turn, and the bounds that they are compared with are bounds."""

from __future__ import annotations

import random

import pytest

from loadtest.simulator.adapter_study import HOT, Case, _with_hot, assigned_loads, least_loads, zipf
from loadtest.simulator.simulation import COLLOCATED, STATIC
from tests.unit.loadtest.simulator.setups import setup


def test_a_pool_that_knows_the_future_loads_least() -> None:
    assert least_loads(list("abcabcabc"), 3) == 3
    assert least_loads(list("abcabcabc"), 2) == 6  # one of two always hits
    assert least_loads(list("aabbcc"), 1) == 3
    draw = random.Random(3)
    for _ in range(50):
        asked = [draw.choice("abcdefgh") for _ in range(60)]
        assert len(set(asked)) <= least_loads(asked, 4) <= assigned_loads(asked, 2, 2)


@pytest.mark.parametrize("policy", [COLLOCATED, STATIC])
def test_every_request_gets_its_adapter_and_a_cold_one_waits_for_the_load(policy: str) -> None:
    case = Case(setup(2 * (policy == STATIC), 4), policy, 20.0, zipf(300, 40, 1.0, 1), 1)
    plain, no_loads, _ = case.played(0.0, 4)
    loaded, num_loads, num_reads = case.played(0.2, 4)
    assert no_loads == 0
    assert num_reads == num_loads
    assert num_loads >= len(set(case.adapters))
    assert all(request.finished_s > 0 for request in (*plain, *loaded))
    assert not any(request.adapter_s for request in plain)
    waited = [request.adapter_s for request in loaded if request.adapter_s]
    assert waited
    assert min(waited) > 0.0


def test_a_hot_adapter_spreads_over_the_workers_and_loads_no_others_out() -> None:
    setup_ = setup(0, 4)
    adapters = _with_hot(zipf(400, 8, 1.0, 2), 0.6, 2)
    assert HOT not in adapters[:200]
    requests, _, _ = Case(setup_, COLLOCATED, 40.0, adapters, 2).played(0.1, 16)
    hot = [request for request in requests if request.adapter == HOT]
    assert len({request.decode for request in hot}) > 1
    assert sum(request.adapter_s > 0 for request in hot) < len(hot) / 2


def test_a_host_that_keeps_all_adapters_reads_none_twice_and_copies_are_soon_there() -> None:
    case = Case(setup(0, 4), COLLOCATED, 20.0, zipf(300, 40, 1.0, 1), 1, copies=40, copy_s=0.01)
    loaded, num_loads, num_reads = case.played(100.0, 12)
    assert num_loads > num_reads == 0
    assert all(request.finished_s > 0 for request in loaded)
    assert 0.0 < max(request.adapter_s for request in loaded) < 100.0
