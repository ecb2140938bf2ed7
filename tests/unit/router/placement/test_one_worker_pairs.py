"""Which workers are looked at for both parts of a request, and what the prompts that are queued there change."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.placement.decision import Route
from services.router.placement.demand import Demand
from services.router.placement.pairs import MOST_DISPLACED, PairPolicy
from services.router.placement.policy import Placement, PlacementConfig
from services.router.placement.prediction import TtftPredictor
from services.router.placement.views import PlacementRequest, Work
from shared.engine.scheduler.pacing import AIM
from shared.kv.groups import KVGroups
from tests.unit.router.placement.builders import pool, prompt
from tests.unit.router.placement.test_pairs import TARGET_S, chosen, known, worker

loads = st.lists(st.tuples(st.integers(0, 20), st.sampled_from((0, 0, 800, 60_000))), min_size=1, max_size=12)


def test_idle_workers_with_long_prompts_do_not_hide_the_one_that_is_best_for_both_parts():
    stuck = [worker(f"stuck{number}", queued=200_000) for number in range(8)]
    best = chosen(*stuck, worker("free", answers=3), request=replace(prompt(500), slack_s=0.5, now_s=0.0))[0]
    assert (best.decode, best.prefill) == ("free", "free")


@given(loads, st.floats(0.05, 3.0))
def test_no_worker_alone_would_have_had_more_requests_in_time(states, slack_s):
    views = [worker(f"w{number}", *state) for number, state in enumerate(states)]
    request = PlacementRequest(700, KVGroups(16), slack_s=slack_s, now_s=0.0)
    pairs = chosen(*views, request=request)
    if pairs:
        alone = [pair for view in views for pair in chosen(view, request=request)]
        assert max(pair.in_time for pair in pairs) >= max((pair.in_time for pair in alone), default=0.0) - 1e-9


def test_of_a_large_fleet_a_worker_may_do_both_parts_as_of_a_small_one():
    workers = pool(*(worker(f"w{number}", answers=1) for number in range(500)))
    placement = Placement(PlacementConfig(tpot_target_s=0.025, ttft_target_s=1.0))
    routes = set()
    for number in range(40):
        choice = placement.choose_pair(replace(prompt(500), slack_s=1.0, now_s=number / 100), workers, workers)
        assert choice is not None
        routes.add(choice.route)
    assert routes == {Route.SAME_WORKER}


def handed(decode, predictor=None):
    """The pair of that worker and one that only prefills."""
    pairs = chosen(decode, worker("p"), preferred={decode.name}, predictor=predictor)
    return next(pair for pair in pairs if (pair.decode, pair.prefill) == (decode.name, "p"))


def test_where_prompts_are_queued_an_answer_that_comes_there_gets_steps_as_long_as_chunks_make_them():
    quiet, busy = handed(worker("d", answers=2)), handed(worker("d", answers=2, queued=2_000_000))
    assert quiet.tpot_s < 0.6 * TARGET_S
    assert busy.tpot_s == pytest.approx(AIM * TARGET_S)
    assert busy.in_time <= quiet.in_time


def test_behind_a_long_prompt_without_answers_an_answer_waits_for_a_whole_step():
    predictor = TtftPredictor()
    predictor.observe_gap(TARGET_S)
    beside, behind = (handed(worker("d", answers=answers, queued=2_000_000), predictor) for answers in (1, 0))
    assert behind.tpot_s > beside.tpot_s
    assert behind.in_time <= beside.in_time


@given(loads, loads, st.integers(0, 100_000))
def test_in_a_pure_split_waits_are_those_of_the_workers_that_prefill_alone(decoding, prefilling, num_ahead):
    decodes = [worker(f"d{number}", *state) for number, state in enumerate(decoding)]
    prefills = [worker(f"p{number}", 0, queued) for number, (_, queued) in enumerate(prefilling)]
    names = frozenset(view.name for view in decodes)
    waits = []
    for views in (decodes + prefills, prefills):
        policy = PairPolicy(TARGET_S, known(), Demand())
        policy.look(decodes + prefills, names)
        policy.is_pure = True
        waits.append(policy.wait_s(Work(num_ahead), pool(*views)))
    assert waits[0] == pytest.approx(waits[1], rel=1e-6)


def split_fleet(num_decodes, prefills):
    """A pool in a pure split, and what predicts for it."""
    decodes = [worker(f"d{number}", answers=20) for number in range(num_decodes)]
    names = frozenset(view.name for view in decodes)
    workers, policy = pool(*decodes, *prefills), PairPolicy(TARGET_S, known(), Demand())
    policy.look(workers, names, workers.version)
    policy.is_pure = True
    return workers, policy


def alone(*views):
    """A policy for these workers, all of which prefill, and their pool."""
    workers, policy = pool(*views), PairPolicy(TARGET_S, known(), Demand())
    policy.look(workers, (), workers.version)
    return workers, policy


@pytest.mark.parametrize("num_prefills", [1, 8, 40])
def test_a_wait_in_a_large_fleet_is_that_of_the_few_workers_that_prefill(num_prefills):
    ahead = Work.of(20_000, 0)
    prefills = [worker(f"p{number}") for number in range(num_prefills)]
    few, of_few = alone(*prefills)
    workers, policy = split_fleet(300, prefills)
    for _ in range(50):
        assert policy.wait_s(ahead, workers) == pytest.approx(of_few.wait_s(ahead, few), rel=1e-6)


def test_a_wait_is_that_of_the_workers_that_are_still_there():
    ahead, prefills = Work.of(20_000, 0), [worker(f"p{number}") for number in range(8)]
    workers, policy = split_fleet(300, prefills)
    for view in prefills[2:]:
        workers.remove(view.name)
    few, of_few = alone(*prefills[:2])
    assert policy.wait_s(ahead, workers) == pytest.approx(of_few.wait_s(ahead, few), rel=1e-6)
    workers.add(worker("new"))
    more, of_more = alone(*prefills[:2], worker("new"))
    assert policy.wait_s(ahead, workers) == pytest.approx(of_more.wait_s(ahead, more), rel=1e-6)


def test_in_a_large_split_fleet_a_prompt_is_computed_as_soon_as_on_a_worker_that_prefills():
    own, one = Work.of(2_000, 0), worker("p")
    workers, policy = split_fleet(300, [one])
    few, of_few = alone(one)
    for _ in range(20):
        assert policy.idle_s(own, workers) == pytest.approx(of_few.idle_s(own, few), rel=1e-6)


counts = st.integers(1, 150)


@settings(deadline=None)
@given(num_decodes=counts, num_prefills=counts, num_idle=counts, num_free=counts, seed=st.integers(0, 2**31))
def test_in_a_pure_split_a_pair_is_found_while_one_worker_of_each_kind_has_room(
    num_decodes, num_prefills, num_idle, num_free, seed
):
    """Few of a kind among many of the other, and few with room among many of their kind."""
    idle, free = min(num_idle, num_prefills), min(num_free, num_decodes)
    prefills = [worker(f"p{number}", queued=0 if number < idle else 200_000) for number in range(num_prefills)]
    decodes = [worker(f"d{number}", answers=5 if number < free else 64) for number in range(num_decodes)]
    workers = pool(*Random(seed).sample(prefills + decodes, len(prefills) + len(decodes)))
    placement = Placement(PlacementConfig(tpot_target_s=TARGET_S, ttft_target_s=1.0), seed)
    taken = frozenset(view.name for view in decodes)
    placement.split.decodes = lambda *_: taken
    placement.split.is_pure = True
    placement.split.displaced = dict.fromkeys((view.name for view in prefills), 2 * MOST_DISPLACED)
    choice = placement.choose_pair(replace(prompt(500), slack_s=1.0, now_s=0.0), workers, workers)
    assert choice is not None
    assert choice.decode in taken
    assert choice.prefill is not None
    assert choice.prefill not in taken
