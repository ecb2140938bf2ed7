"""The planner's policy on plain numbers: budget, hysteresis, direction, cold starts."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.policy.budget import Pair, gpus, replicas_now, within
from services.planner.policy.config import PlannerConfig, PoolLimits
from services.planner.policy.need import MissedShare
from services.planner.policy.observation import Observation, PoolCount
from services.planner.policy.planner import Decision, Planner
from shared.errors import ConfigError
from shared.sizing.queueing import mean_wait_s
from tests.examples import examples

CONFIG = PlannerConfig(gpu_budget=40, ttft_s=2.0, tpot_s=0.05, decode_sequences=20.0, start_s=60.0)
TICK_S = 10.0


@dataclass
class Load:
    """What a fleet that keeps up would show."""

    rate: float
    prefill_s: float = 0.5
    output_s: float = 8.0
    mean_rate: float | None = None
    """Of a rate that is noise about it: what waits follow."""

    def seen(self, now_s: float, size: Pair, **more) -> Observation:
        requests = round(self.rate * TICK_S)
        load = (self.mean_rate or self.rate) * self.prefill_s
        wait_s = min(10.0, mean_wait_s(size.prefill, load, self.prefill_s, CONFIG.variation))
        figures = {
            "ttft_sum_s": requests * (self.prefill_s + wait_s),
            "num_arrived": requests,
            "num_answered": requests,
            "num_finished": requests,
            "prefill_busy_s": requests * self.prefill_s,
            "num_sequences": self.rate * self.output_s,
            "decode_kv_share": min(1.0, 0.02 * self.rate / size.decode),
        }
        pools = {"prefill": PoolCount(size.prefill, size.prefill), "decode": PoolCount(size.decode, size.decode)}
        return Observation(now_s, **{**pools, **figures, **more})


def play(
    planner: Planner, rates: list[float], size: Pair, begin_s: float = 0.0, mean_rate: float | None = None
) -> list[tuple[float, Decision]]:
    """One tick for each rate; sizes change at once. The decisions that changed something."""
    changes = []
    for number, rate in enumerate(rates):
        decision = planner.decide(Load(rate, mean_rate=mean_rate).seen(begin_s + number * TICK_S, size))
        size = decision.target
        if decision.changes:
            changes.append((begin_s + number * TICK_S, decision))
    return changes


@pytest.mark.parametrize("seed", range(2))
def test_a_poisson_process_of_constant_rate_changes_nothing(seed):
    rng, planner = np.random.default_rng(seed), Planner(CONFIG)

    def arrivals() -> float:
        return float(rng.poisson(8 * TICK_S)) / TICK_S

    settled = play(planner, [arrivals() for _ in range(120)], Pair(6, 4), mean_rate=8.0)
    last = settled[-1][1].target if settled else Pair(6, 4)
    assert play(planner, [arrivals() for _ in range(300)], last, begin_s=120 * TICK_S, mean_rate=8.0) == []


@given(st.lists(st.floats(0.0, 30.0), min_size=4, max_size=20), st.randoms(use_true_random=False))
@examples(20)
def test_two_changes_of_direction_are_five_minutes_apart(levels, rng):
    rates = [level * rng.uniform(0.7, 1.3) for level in levels for _ in range(rng.randint(3, 30))]
    changes = play(Planner(CONFIG), rates, Pair(3, 3))
    for pool in ("prefill", "decode"):
        turned_s, direction = None, 0
        for at_s, decision in changes:
            change = getattr(decision.target, pool) - getattr(decision.before, pool)
            if change and direction and (change > 0) != (direction > 0):
                assert turned_s is None or at_s - turned_s >= CONFIG.direction_s
                turned_s = at_s
            direction = change or direction


def test_it_grows_at_once_and_shrinks_after_the_window():
    planner = Planner(CONFIG)
    size = Pair(3, 2)
    grown = play(planner, [2.0] * 60 + [8.0] * 60, size)
    first = next(at_s for at_s, decision in grown if at_s >= 600)
    assert 600 <= first <= 660
    peak = grown[-1][1].target
    assert peak.prefill > 3
    shrunk = play(planner, [1.0] * 120, peak, begin_s=1200.0)
    first = next(at_s for at_s, decision in shrunk if decision.target.prefill < peak.prefill)
    assert first >= 1200 + CONFIG.down_window_s


def test_a_steady_rise_is_met_before_it_has_come():
    """The forecast looks `start_s` ahead: at that time the workers serve."""
    rates = [2.0] * 30 + [2.0 + 0.1 * number for number in range(100)]
    planner, blind = Planner(CONFIG), Planner(CONFIG.replace(start_s=0.0))
    seeing, late = (play(one, rates, Pair(3, 2)) for one in (planner, blind))
    for size in (5, 6, 7):
        first = [next(at for at, one in changes if one.target.prefill >= size) for changes in (seeing, late)]
        assert first[0] < first[1]


def test_a_cold_workers_latencies_are_not_learnt_from():
    def learnt(num_cold: int, num_late: int) -> int:
        planner, load = Planner(CONFIG), Load(3.0)
        for tick in range(90):
            pools = {"prefill": PoolCount(3, 3, num_cold=num_cold)}
            decision = planner.decide(load.seen(tick * TICK_S, Pair(3, 3), num_late=num_late, **pools))
        return decision.target.prefill

    assert learnt(num_cold=1, num_late=10) == learnt(num_cold=0, num_late=0)
    assert learnt(num_cold=0, num_late=10) > learnt(num_cold=0, num_late=0)


def test_requests_that_miss_tpot_lower_what_a_decode_worker_is_trusted_with():
    planner, size = Planner(CONFIG), Pair(4, 2)
    for tick in range(60):
        decision = planner.decide(Load(4.5).seen(tick * TICK_S, size, num_slow=20))
    assert decision.target.decode > 2


def test_without_figures_nothing_changes():
    planner, size = Planner(CONFIG), Pair(3, 2)
    for tick in range(60):
        seen = replace(Load(3.0).seen(tick * TICK_S, size), num_arrived=None)
        assert planner.decide(seen).target == size


def test_a_refused_decision_is_as_if_it_had_not_been_made():
    planner, size = Planner(CONFIG), Pair(1, 1)
    assert not planner.decide(Load(8.0).seen(0.0, size)).changes
    decision = planner.decide(Load(8.0).seen(TICK_S, size))
    assert decision.changes
    planner.refused(decision)
    again = planner.decide(Load(8.0).seen(2 * TICK_S, size))
    assert (again.before, again.changes) == (size, True)


def test_every_decision_says_why():
    (_, decision), *_ = play(Planner(CONFIG), [10.0] * 30, Pair(1, 1))
    assert "prefill 1 → " in str(decision)
    assert "req/s keep" in str(decision)


@given(
    st.integers(2, 60), st.integers(1, 4), st.integers(1, 8), st.integers(1, 60), st.integers(1, 60),
)  # fmt: skip
@examples(50)
def test_the_allowed_pair_is_within_the_budget_and_wastes_none_of_it(
    budget, prefill_gpus, decode_gpus, prefill, decode
):
    config = PlannerConfig(
        prefill=PoolLimits(gpus_per_worker=prefill_gpus),
        decode=PoolLimits(gpus_per_worker=decode_gpus),
        gpu_budget=budget,
    )
    if gpus(config, Pair(1, 1)) > budget:
        with pytest.raises(ConfigError):
            Planner(config)
        return
    got = within(config, Pair(prefill, decode))
    assert gpus(config, got) <= budget
    assert 1 <= got.prefill <= prefill
    assert 1 <= got.decode <= decode
    for more, wanted in ((Pair(got.prefill + 1, got.decode), prefill), (Pair(got.prefill, got.decode + 1), decode)):
        assert gpus(config, more) > budget or more.prefill > prefill or more.decode > decode or wanted == 0


class PodPool:
    """Pods that begin and end at random, as controllers and kubelets may take their time."""

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self.replicas, self.starting, self.ready, self.ending = replicas, 0, replicas, 0
        self._rng = rng

    def move(self) -> None:
        alive = self.starting + self.ready
        if alive < self.replicas:
            self.starting += self._rng.randint(0, self.replicas - alive)
        while self.starting + self.ready > self.replicas and self._rng.random() < 0.5:
            if self.ready and (not self.starting or self._rng.random() < 0.5):
                self.ready -= 1
            else:
                self.starting -= 1
            self.ending += 1
        came = self._rng.randint(0, self.starting)
        self.starting, self.ready = self.starting - came, self.ready + came
        self.ending -= self._rng.randint(0, self.ending)

    @property
    def num_pods(self) -> int:
        return self.starting + self.ready + self.ending

    @property
    def count(self) -> PoolCount:
        extra = max(0, self.starting + self.ready - self.replicas)
        return PoolCount(self.replicas, self.ready, self.ending, extra)


@given(
    st.integers(0, 1 << 32).map(random.Random),
    st.lists(st.tuples(st.floats(0, 40), st.floats(0.01, 3), st.floats(0.1, 20)), min_size=5, max_size=25),
    st.integers(8, 24),
)
@examples(40)
def test_no_moment_of_any_change_exceeds_the_budget(rng, loads, budget):
    limits = [PoolLimits(max_workers=rng.randint(1, 12), gpus_per_worker=rng.choice([1, 2, 4])) for _ in range(2)]
    config = PlannerConfig(prefill=limits[0], decode=limits[1], gpu_budget=budget, ttft_s=1.0, decode_sequences=8.0)
    begin = within(config, Pair(rng.randint(1, 6), rng.randint(1, 6)))
    prefill, decode = pools = PodPool(begin.prefill, rng), PodPool(begin.decode, rng)
    planner = Planner(config)

    def move_all() -> None:
        for pool in pools:
            pool.move()
            assert gpus(config, Pair(prefill.num_pods, decode.num_pods)) <= budget

    for tick, (rate, prefill_s, output_s) in enumerate(loads):
        counts = {"prefill": prefill.count, "decode": decode.count}
        seen = replace(Load(rate, prefill_s, output_s).seen(tick * 200.0, begin), **counts)
        target = planner.decide(seen).target
        assert gpus(config, target) <= budget
        for pool, wanted in zip(pools, (target.prefill, target.decode), strict=True):
            if wanted < pool.replicas and rng.random() < 0.7:  # else its victims still drain
                pool.replicas -= rng.randint(1, pool.replicas - wanted)
        # What was counted before the pools moved is out of date by then, to the safe side alone.
        grown = replicas_now(config, target, prefill.count, decode.count)
        move_all()
        prefill.replicas, decode.replicas = max(prefill.replicas, grown.prefill), max(decode.replicas, grown.decode)
        move_all()


def test_a_change_from_one_pool_to_the_other_waits_for_the_pods_to_be_gone():
    config = PlannerConfig(gpu_budget=8)
    target = Pair(3, 5)
    assert replicas_now(config, target, PoolCount(5, 5), PoolCount(3, 3)) == Pair(5, 3)
    assert replicas_now(config, target, PoolCount(3, 3, num_extra=2), PoolCount(3, 3)) == Pair(3, 3)
    assert replicas_now(config, target, PoolCount(3, 3, num_ending=2), PoolCount(3, 3)) == Pair(3, 3)
    assert replicas_now(config, target, PoolCount(3, 3, num_ending=1), PoolCount(3, 3)) == Pair(3, 4)
    assert replicas_now(config, target, PoolCount(3, 3), PoolCount(3, 3)) == Pair(3, 5)


def test_a_half_empty_decode_pool_does_not_shrink_into_one_that_is_too_slow():
    """A token takes 20 ms and 0.6 ms for each sequence beside it, so three workers hold fewer sequences than two would
    for the same load: counted as they are, two would seem to do."""

    def sequences(rate: float, workers: int) -> float:
        return rate * 300 * 0.020 / (1 - rate * 300 * 0.0006 / workers)

    config = CONFIG.replace(decode_sequences=50.0, tpot_s=0.055)
    planner, size, rate = Planner(config), Pair(4, 3), 6.4
    for tick in range(200):
        rate = min(6.8, rate + 0.02)
        running = sequences(rate, size.decode)
        tpot_s = 0.020 + 0.0006 * running / size.decode
        finished = round(rate * TICK_S)
        load = Load(rate, prefill_s=0.2)
        seen = load.seen(tick * TICK_S, size, num_sequences=running, tpot_sum_s=finished * tpot_s, decode_kv_share=0.1)
        assert planner.decide(seen).target.decode == 3
    assert sequences(rate, 3) / 50.0 * (1 + config.band) < 2 < sequences(rate, 2) / 50.0


def test_prompts_that_wait_little_need_fewer_workers_than_the_configured_variation_says():
    def settled(waited_s: float) -> int:
        planner, size = Planner(CONFIG), Pair(8, 4)
        for tick in range(300):
            requests = round(6.0 * TICK_S)
            seen = Load(6.0).seen(tick * TICK_S, size, ttft_sum_s=requests * (0.5 + waited_s))
            size = planner.decide(seen).target
        return size.prefill

    assert settled(0.0) < settled(10.0)


@pytest.mark.parametrize("variation", [0.5, 3.0])
def test_waits_of_prompts_that_vary_so_much_are_learnt_as_that(variation):
    planner, rate, size = Planner(CONFIG), 12.0, Pair(8, 4)
    for tick in range(300):
        wait_s = mean_wait_s(size.prefill, rate * 0.5, 0.5, variation)
        decision = planner.decide(Load(rate).seen(tick * TICK_S, size, ttft_sum_s=rate * TICK_S * (0.5 + wait_s)))
    learnt = re.search(r"variation ([0-9.]+)", str(decision))
    assert learnt is not None
    assert 1 + float(learnt[1]) == pytest.approx(1 + variation, rel=0.2)  # it follows in steps


def test_the_pool_that_missed_more_is_blamed_for_both():
    share = MissedShare(0.05)
    assert [share.observe(tick * TICK_S, 4, 3, 100) for tick in range(3)] == [None, None, None]
    assert share.observe(120.0, 4, 3, 100) is True
    other = MissedShare(0.05)
    assert [other.observe(at_s, 3, 4, 100) for at_s in (0.0, 120.0)] == [None, False]
    assert MissedShare(0.05).observe(0.0, 40, 0, 100) is True
