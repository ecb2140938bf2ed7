"""One pool whose workers prefill and decode: its size follows the demand, and the mix moves preferences first."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from services.planner.policy.budget import Pair
from services.planner.policy.config import PlannerConfig, PoolLimits
from services.planner.policy.elastic import ElasticPlanner, typical
from services.planner.policy.observation import Observation, PoolCount
from services.planner.policy.planner import Decision
from services.planner.settings import PlannerSettings
from services.router.placement.demand import Mix
from services.router.placement.views import Work
from services.router.placement.what_if import Targets, pool_headroom
from shared.errors import ConfigError
from tests.examples import examples
from tests.unit.router.placement.test_split import GROUPS, SLOW, fleet

CONFIG = PlannerConfig(
    gpu_budget=40, ttft_s=2.0, tpot_s=0.03, start_s=60.0, is_elastic=True, decode=PoolLimits(max_workers=60)
)
TICK_S = 10.0
TARGETS = Targets(CONFIG.tpot_s, CONFIG.ttft_s)


def seen(now_s: float, rate: float, size: int, prompt: int = 1000, output: int = 300, **more) -> Observation:
    """What an elastic pool that keeps up would show."""
    ended = round(rate * TICK_S)
    figures = {
        "num_arrived": ended,
        "num_answered": ended,
        "num_finished": ended,
        "num_ended": ended,
        "num_prompt_tokens": ended * prompt,
        "num_output_tokens": ended * output,
        "workers": fleet(size),
        "groups": GROUPS,
    }
    return Observation(now_s, **{"prefill": PoolCount(0, 0), "decode": PoolCount(size, size), **figures, **more})


def play(planner: ElasticPlanner, ticks: int, rate: float, size: int, begin_s: float = 0.0, **more) -> list[Decision]:
    """Sizes change at once. All decisions."""
    decisions = []
    for number in range(ticks):
        decisions.append(planner.decide(seen(begin_s + number * TICK_S, rate, size, **more)))
        size = decisions[-1].target.decode
    return decisions


def headroom(size: int, rate: float, prompt: int = 1000, output: int = 300) -> float:
    return pool_headroom(fleet(1)[0], size, Mix(rate, Work.of(prompt, 0), prompt, output), TARGETS, GROUPS)


@pytest.mark.parametrize(("rate", "begin"), [(7.3, 40), (61.0, 1)])
def test_constant_load_ends_at_the_fewest_workers_with_the_headroom_and_stays_there(rate, begin):
    ends_at_the_fewest_workers(rate, begin)


@pytest.mark.slow
@given(st.floats(5.0, 100.0), st.integers(1, 40))
@examples(20, phases=(Phase.explicit, Phase.generate))
def test_any_constant_load_does(rate, begin):
    ends_at_the_fewest_workers(rate, begin)


def ends_at_the_fewest_workers(rate: float, begin: int) -> None:
    planner = ElasticPlanner(CONFIG)
    decisions = play(planner, 40, rate, begin)
    size = decisions[-1].target.decode
    real = round(rate * TICK_S) / TICK_S
    assert decisions[-1].target == Pair(0, size)
    assert headroom(size, real) >= CONFIG.headroom * (1 - CONFIG.band / 2)
    assert size == 1 or headroom(size - 1, real) < CONFIG.headroom * (1 + CONFIG.band)
    assert not any(decision.changes for decision in decisions[-10:])


def test_another_mix_that_fits_moves_preferences_alone():
    planner = ElasticPlanner(CONFIG)
    size = play(planner, 20, 40.0, 16)[-1].target.decode
    # Longer prompts and shorter answers, at a rate at which as many workers have as much headroom at another split.
    rate = next(rate for rate in range(200, 0, -1) if headroom(size, rate, 3000, 100) >= CONFIG.headroom * 1.02)
    after = play(planner, 20, float(rate), size, 200.0, prompt=3000, output=100)
    assert abs(after[-1].target.decode - size) <= 1
    assert "workers, split best, have headroom" in str(after[-1])


def test_more_load_takes_more_workers_at_once_and_less_gives_them_back_later():
    planner = ElasticPlanner(CONFIG)
    size = play(planner, 20, 20.0, 8)[-1].target.decode
    grown = play(planner, 15, 80.0, size, 200.0)
    assert grown[-1].target.decode >= 3 * size
    assert any(decision.changes for decision in grown[:4])
    shrunk = play(planner, 50, 20.0, grown[-1].target.decode, 350.0)
    assert not shrunk[0].changes
    assert shrunk[-1].target.decode == pytest.approx(size, abs=1)


def test_workers_of_other_pools_bear_their_part():
    alone = play(ElasticPlanner(CONFIG), 40, 40.0, 8)[-1].target.decode
    decision = play(ElasticPlanner(CONFIG), 40, 40.0, 8, num_beside=3)[-1]
    assert decision.target.decode == alone - 3
    assert f"{alone - 3} workers and 3 of other pools, split best, have headroom" in decision.reason
    assert play(ElasticPlanner(CONFIG), 40, 40.0, 8, num_beside=alone + 3)[-1].target.decode == 1


def test_the_budget_bounds_the_pool_and_the_reason_says_so():
    decision = play(ElasticPlanner(CONFIG), 20, 2000.0, 4)[-1]
    assert decision.target.decode == CONFIG.gpu_budget
    assert "the budget is 40 GPUs" in decision.reason


def test_late_requests_raise_the_size_where_the_model_is_too_hopeful():
    calm, late = ElasticPlanner(CONFIG), ElasticPlanner(CONFIG)
    expected = play(calm, 20, 40.0, 8)[-1].target.decode
    assert play(late, 20, 40.0, 8, num_late=200)[-1].target.decode > expected


def test_requests_that_are_late_and_those_that_are_slow_add_up():
    some = round(0.6 * (1 - CONFIG.attainment) * 40.0 * TICK_S)  # fewer than the goal allows

    def size(**missed: int) -> int:
        return play(ElasticPlanner(CONFIG), 40, 40.0, 8, **missed)[-1].target.decode

    assert size() == size(num_late=some) == size(num_slow=some) < size(num_late=some, num_slow=some)


def test_nothing_is_changed_before_anything_is_known_or_where_nothing_would_help():
    assert not any(decision.changes for decision in play(ElasticPlanner(CONFIG), 20, 20.0, 5, workers=fleet(5, None)))
    assert not any(decision.changes for decision in play(ElasticPlanner(CONFIG), 20, 20.0, 5, num_ended=0))
    hopeless = ElasticPlanner(CONFIG.replace(tpot_s=0.001))
    decisions = play(hopeless, 20, 20.0, 5)
    assert not any(decision.changes for decision in decisions)
    assert "no number of workers meets the targets" in decisions[-1].reason


def test_a_decision_that_could_not_be_carried_out_starts_again_from_the_size_before():
    planner = ElasticPlanner(CONFIG)
    decision = next(one for one in play(planner, 20, 80.0, 2) if one.changes)
    planner.refused(decision)
    assert planner.decide(seen(1000.0, 80.0, decision.before.decode)).before == decision.before


def test_a_decision_speaks_of_one_pool():
    decision = Decision(Pair(0, 4), Pair(0, 3), "why", is_elastic=True)
    assert (str(decision), decision.sizes) == ("auto 3 → 4: why", (("auto", 3, 4),))


def test_the_typical_worker_is_the_one_in_the_middle_and_needs_known_steps():
    mixed = [*fleet(2, None, "unknown"), *fleet(2), *fleet(1, SLOW, "slow")]
    found = typical(mixed)
    assert found is not None
    assert found.name == "w01"
    assert typical(fleet(3, None)) is None


def test_limits_of_the_one_pool_alone_are_checked():
    with pytest.raises(ConfigError) as error:
        ElasticPlanner(CONFIG.replace(decode=PoolLimits(min_workers=41, max_workers=60)))
    assert error.value.details["field"] == "gpu_budget"
    with pytest.raises(ConfigError) as error:
        ElasticPlanner(CONFIG.replace(decode=PoolLimits(min_workers=5, max_workers=4)))
    assert error.value.details["field"] == "auto.max_workers"


def test_an_elastic_pool_is_named_alone():
    named = PlannerSettings(release="r", auto={"name": "pool", "max_workers": 7})
    config = named.policy()
    assert (named.pool_names, config.is_elastic, config.decode.max_workers) == (("", "pool"), True, 7)
    with pytest.raises(ConfigError) as error:
        PlannerSettings(release="r", auto={"name": "pool"}, decode={"name": "d"}).policy()
    assert error.value.field == "decode.name"
