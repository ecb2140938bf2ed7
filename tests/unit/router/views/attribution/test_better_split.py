"""The split that would have served the last requests better, by the controller's model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from services.router.placement.demand import Mix
from services.router.placement.split import FEWEST_ARRIVALS
from services.router.placement.views import Work
from services.router.placement.what_if import Targets, headrooms
from services.router.views.attribution.better_split import WORTH, UsedFleet, judge_split, mix_of, targets_of
from services.router.views.attribution.verdict import Outcome, Verdict
from tests.unit.router.placement.test_split import FAST, GROUPS, TPOT_S, fleet
from tests.unit.router.views.attribution.requests import ended

TARGETS = Targets(TPOT_S, 2.0)
GOOD = Verdict(True)


def used(mode: str, num_prefills: int, num_decodes: int, num_decoding: int = 0, **changes) -> UsedFleet:
    prefills, decodes = fleet(num_prefills, name="p", **changes), fleet(num_decodes, name="d", **changes)
    return UsedFleet(mode, prefills, decodes, num_decoding or num_decodes, GROUPS)  # type: ignore[arg-type]


def mix(prompt: int = 4000, output: float = 64.0, rate: float = 20.0) -> Mix:
    return Mix(rate, Work.of(prompt, 0), prompt, output)


def test_two_pools_of_the_wrong_sizes_are_told_the_right_ones():
    verdict = judge_split(used("disaggregated", 4, 4), mix(), TARGETS)
    assert verdict is not None
    assert (verdict.num_workers, verdict.num_decoding) == (8, 4)
    assert verdict.best_decoding < 4
    assert verdict.is_worth_it
    right = judge_split(used("disaggregated", 8 - verdict.best_decoding, verdict.best_decoding), mix(), TARGETS)
    assert right is not None
    assert right.headroom == pytest.approx(verdict.best_headroom if not verdict.is_elastic else right.headroom)
    assert right.headroom > verdict.headroom


def test_prompts_beside_answers_count_in_two_pools_only_as_what_another_mode_could_do():
    verdict = judge_split(used("disaggregated", 1, 7), mix(), TARGETS)
    shared = judge_split(used("auto", 0, 8, 7), mix(), TARGETS)
    assert verdict is not None
    assert shared is not None
    assert verdict.headroom < shared.headroom


def test_every_split_of_a_large_fleet_has_a_verdict():
    for num_decodes in range(1, 64):
        verdict = judge_split(used("disaggregated", 64 - num_decodes, num_decodes), mix(), TARGETS)
        assert verdict is not None
        assert verdict.num_decoding == num_decodes


def test_the_present_and_the_best_split_are_what_the_model_says():
    verdict = judge_split(used("collocated", 0, 8), mix(), TARGETS)
    found = headrooms(fleet(8, name="d"), mix(), TARGETS, GROUPS)
    assert verdict is not None
    assert (verdict.headroom, verdict.best_headroom) == (found[8], max(found.values()))
    assert verdict.best_decoding == max(found, key=found.__getitem__)
    assert verdict.is_worth_it == (max(found.values()) > WORTH * found[8])


def test_a_prefill_workers_steps_tell_of_prompts_and_a_decode_workers_of_answers():
    fleet_now = used("disaggregated", 2, 2)
    for view in fleet_now.decodes:  # they have never seen a prompt
        view.times = replace(FAST, token_s=0.0, attention_s=0.0)
    for view in fleet_now.prefills:
        view.times = replace(FAST, kv_s=0.0, sequence_s=0.0)
    assert judge_split(fleet_now, mix(), TARGETS) == judge_split(used("disaggregated", 2, 2), mix(), TARGETS)


def test_nothing_is_told_without_steps_or_a_target():
    assert judge_split(used("collocated", 0, 4, times=None), mix(), TARGETS) is None
    assert judge_split(used("disaggregated", 2, 2, times=None), mix(), TARGETS) is None
    assert judge_split(used("collocated", 0, 4), mix(), targets_of(2.0, 0.0)) is None
    assert targets_of(0.0, 0.05) == Targets(0.05, math.inf)


def test_the_mix_is_of_all_that_came_and_of_the_answers_that_ended():
    done = [(ended(num_output_tokens=21, num_cached_tokens=4), GOOD)] * FEWEST_ARRIVALS
    refused = [(ended(Outcome.REFUSED, ttft_ms=None), GOOD)] * FEWEST_ARRIVALS
    found = mix_of([*done, *refused], 60.0, 100.0 + 4.0)
    assert found is not None
    assert found.rate == pytest.approx(2 * FEWEST_ARRIVALS / 4.0)  # all of them in the last four seconds
    assert (found.num_prompt_tokens, found.prompt, found.output_len) == (8, Work.of(4, 4), 21)
    assert mix_of(done[1:], 60.0, 104.0) is None
    assert mix_of(refused, 60.0, 104.0) is None
