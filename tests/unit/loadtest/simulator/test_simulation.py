"""Whole runs: everything ends, nothing leaks, the same seed gives the same result, ours holds what it promises."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median

import pytest

from loadtest.simulator.cli import FleetOptions, WorkerOptions, main, setup_of
from loadtest.simulator.load import WORKLOADS, at_rate, poisson
from loadtest.simulator.outcome import Targets, summarize
from loadtest.simulator.peers import PEERS
from loadtest.simulator.simulation import AUTO, POLICIES, TANDEM, Group, play, simulate
from loadtest.simulator.split_study.systems import Pool, System
from services.router.placement.decision import Route
from services.router.placement.policy import Placement
from shared.errors import ConfigError
from shared.identity import roles_text
from shared.sizing.devices import GPUS, H200
from shared.sizing.measured_steps import measured
from shared.sizing.roofline import roofline, step_times
from shared.sizing.shapes import LLAMA_3_8B, LLAMA_3_70B
from shared.sizing.spread import Spread
from tests.unit.loadtest.simulator.setups import HEAD, head, repeated, setup, spec


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_and_the_same_seed_gives_the_same_run(policy):
    first = play(head(40), 4.0, policy, setup())
    again = play(head(40), 4.0, policy, setup())
    assert first == again
    for one in first:
        assert one.refused or one.at_s < one.first_token_s <= one.finished_s
        assert one.num_cached_tokens < one.num_prompt_tokens


def test_blocks_too_few_for_the_load_delay_requests_but_lose_none():
    tight = setup(2, 2, worker=spec(num_blocks=2250))
    trace = [line for line in head(150) if line.num_prompt_tokens < 60_000]
    for policy in ("round-robin", TANDEM, AUTO):
        outcome = simulate(trace, 6.0, policy, tight)
        assert outcome.goodput > 0


def test_collocated_runs_without_prefill_workers():
    outcome = simulate(head(150), 1.0, "tandem", setup(0, 8))
    assert outcome.prefilled_here == 1.0
    assert outcome.good_share > 0.5


def test_auto_alone_compares_pairs_and_decides_which_workers_decode(monkeypatch):
    routes, splits = set(), []
    choose_pair = Placement.choose_pair

    def noted(self, *args):
        choice = choose_pair(self, *args)
        splits.append(self.split.split.decodes)
        if choice is not None:
            routes.add(choice.route)
        return choice

    monkeypatch.setattr(Placement, "choose_pair", noted)
    simulate(head(60), 1.0, "static", setup(4, 4))
    simulate(head(60), 1.0, "collocated", setup(0, 8))
    assert not splits
    fleet = replace(setup(4, 4), groups=[Group(8, spec(tpot_target_s=0.05))])
    assert simulate(head(60), 2.0, "auto", fleet).goodput > 0
    assert {Route.COLLOCATED, Route.SAME_WORKER} <= routes  # before any steps are known, and from then on
    assert splits[-1]
    assert splits[-1] <= {f"w{number}" for number in range(8)}


@pytest.mark.slow
def test_what_auto_admits_beyond_its_capacity_is_not_overtaken_until_it_is_late():
    """Requests that are bound with half of their time gone had none left for the shorter ones that came behind them."""
    targets, times = Targets(1.0, 0.025), roofline(LLAMA_3_8B, GPUS["H100"], 1)
    pool = Pool([spec(times=times, num_blocks=20_000)] * 4)
    arriving = poisson(at_rate(WORKLOADS["prefill-heavy"].requests(480, 0), 32.0, 15.0), 0)
    auto = System(AUTO)
    requests = play(arriving, 1.0, auto.policy, pool.setup(auto, targets))
    served = [request for request in requests if not request.refused]
    assert len(served) < len(requests)
    assert sum(request.ttft_s > targets.ttft_s for request in served) <= 0.01 * len(served)


def test_ours_beats_round_robin_where_prefixes_and_queues_matter():
    trace = head()
    blind = simulate(trace, 4.0, "round-robin", setup())
    ours = simulate(trace, 4.0, "tandem", setup())
    assert ours.goodput > blind.goodput
    assert ours.hit_rate > blind.hit_rate


@pytest.mark.slow
def test_at_three_times_the_capacity_goodput_stays():
    """Every first token in time is one: what cannot be in time is refused, and its place goes to one that can."""
    trace = head()
    goodputs = {speedup: simulate(trace, speedup, "tandem", setup()).goodput for speedup in (2.0, 3.0, 4.0, 12.0)}
    assert goodputs[12.0] >= 0.9 * max(goodputs.values())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fcfs", "deadline"])
def test_a_fleet_at_three_times_its_capacity_refuses_at_arrival_and_its_queue_does_not_grow(order):
    """The whole figure: goodput ≥ 90 % of its maximum, ≥ 98.5 % of the refusals at once, no queue that grows."""
    trace = repeated(6)
    fleet = setup(16, 16)
    fleet = replace(fleet, tandem=replace(fleet.tandem, order=order))
    goodputs = {speedup: simulate(trace, speedup, "tandem", fleet).goodput for speedup in (8.0, 12.0, 16.0)}
    requests = play(trace, 48.0, "tandem", fleet)
    outcome = summarize("tandem", requests, fleet.targets, 0.0)
    assert outcome.goodput >= 0.9 * max(goodputs.values())
    assert outcome.refused > 0.3
    assert outcome.refused_late <= 0.015
    assert requests == play(trace, 48.0, "tandem", fleet)
    thirds: list[list[float]] = [[], [], []]
    for request in requests:
        if not request.refused:
            thirds[min(2, int(3 * request.at_s / requests[-1].at_s))].append(request.ttft_s)
    waits_s = [sum(third) / len(third) for third in thirds]
    assert waits_s[2] <= 1.2 * waits_s[1]  # once the queue has filled up, who comes later does not wait longer


@pytest.fixture(scope="module")
def one() -> float:
    """Goodput of 16 workers of each role behind one router that sees all of them."""
    return simulate(head(), 7.0, "tandem", setup(16, 16)).goodput


@pytest.mark.slow
def test_several_routers_with_views_a_step_old_place_nearly_as_well_as_one(one):
    trace = head()
    stale = replace(spec(), report_s=0.05)
    four = simulate(trace, 7.0, "tandem", setup(16, 16, worker=stale, num_routers=4)).goodput
    assert four >= 0.97 * one


@pytest.mark.slow
@pytest.mark.parametrize("load", [1.25, pytest.param(1.75, marks=pytest.mark.slow)])
def test_eight_routers_with_views_of_a_quarter_second_lose_little_goodput_at_64_workers(load):
    trace = repeated(4)
    speedup = 64 * load * (trace[-1].at_s - trace[0].at_s) / len(trace)
    shares = []
    for seed in range(3):  # one seed's share is 0.98-0.99 at 1.25, 0.90-0.95 at 1.75
        one, eight = (
            simulate(trace, speedup, "tandem", setup(64, 64, worker=spec(report_s=age_s), num_routers=num, seed=seed))
            for num, age_s in ((1, 0.005), (8, 0.25))
        )
        shares.append(eight.goodput / one.goodput)
    # At 1.75 a request in ten is refused by the single router too: more than the fleet can serve.
    assert median(shares) >= (0.97 if load < 1.5 else 0.87)


def test_a_router_that_gets_all_the_load_uses_the_whole_fleet():
    """Of four replicas three are idle: their workers are not kept for them."""
    trace = head(120)
    one = simulate(trace, 3.5, "tandem", setup(8, 8)).goodput
    uneven = replace(setup(8, 8, num_routers=4), only_router=0)
    assert simulate(trace, 3.5, "tandem", uneven).goodput >= 0.97 * one


@pytest.mark.slow
def test_looking_at_few_workers_costs_little_goodput(one):
    trace = head()
    few = {"max_candidates": 4, "tie_margin": 0.02}
    assert simulate(trace, 7.0, "tandem", setup(16, 16, placement=few)).goodput >= 0.95 * one


@pytest.mark.slow
def test_a_thousand_workers_are_simulated_in_seconds():
    outcome = simulate(head(50), 200.0, "tandem", setup(1000, 1000))
    assert outcome.refused < 0.2


def test_the_command_prints_its_table_and_writes_its_json(tmp_path, capsys):
    out = tmp_path / "out.json"
    main(
        ["--trace", str(HEAD), "--slice", "0:12", "--prefill", "3", "--decode", "3",
         "--speedup", "2", "--seed", "7", "--out", str(out)]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in (*PEERS, TANDEM))
    written = json.loads(out.read_text())
    assert len(written["results"]) == 2 * len((*PEERS, TANDEM))
    ours = [row for row in written["results"] if "ratio" in row]
    assert {row["peer"] for row in ours} <= set(POLICIES)
    assert len(ours) == 2


def test_wrong_arguments_are_named():
    for flags, field in (
        (["--slice", "99999:"], "slice"),
        (["--gpus", "1"], "gpus"),
        (["--speedup", "0"], "speedup"),
        (["--workload", "balanced"], "trace"),
        (["--noise", "2"], "noise"),
        (["--blocks", "100"], "blocks"),
    ):
        with pytest.raises(ConfigError) as wrong:
            main(["--trace", str(HEAD), *flags])
        assert wrong.value.field == field
    for flags, field in (
        (["--degrees", "tp=4,ep=3"], "ep"),
        (["--decode-degrees", "four"], "decode-degrees"),
        (["--degrees", "tp=1"], "degrees"),
        (["--degrees", "tp=2", "--steps", "measured.json"], "steps"),
    ):
        with pytest.raises(ConfigError) as wrong:
            main(["--trace", str(HEAD), *flags])
        assert wrong.value.field == field


def test_pools_of_unequal_degrees_have_steps_and_room_of_their_own():
    options = WorkerOptions(degrees="tp=4", decode_degrees="tp=2,pp=2")
    pair = setup_of(options, FleetOptions(prefill=4, decode=4))
    prefill, decode = pair.groups
    assert prefill.worker.times == step_times(LLAMA_3_70B, H200, Spread(4))
    assert decode.worker.times == step_times(LLAMA_3_70B, H200, Spread(2, 2))
    equal = replace(pair, groups=(prefill, replace(decode, worker=replace(decode.worker, times=prefill.worker.times))))
    trace = head(50)
    unequal, same = simulate(trace, 1.0, "tandem", pair), simulate(trace, 1.0, "tandem", equal)
    longer = decode.worker.times.decode_step_s(8, 0) / prefill.worker.times.decode_step_s(8, 0)
    assert longer > 1.5, "two stages read their weights for every part of the batch"
    assert unequal.tpot_p90_s > same.tpot_p90_s
    small = replace(pair, groups=(prefill, replace(decode, worker=replace(decode.worker, num_blocks=6000))))
    assert simulate(trace, 1.0, "tandem", small).goodput < unequal.goodput


def test_a_cache_in_codes_holds_and_moves_about_twice_the_tokens():
    wide, narrow = (setup_of(WorkerOptions(kv_dtype=dtype), FleetOptions()).worker for dtype in ("bf16", "int8"))
    assert narrow.kv_bytes_per_token == wide.kv_bytes_per_token * (128 + 4) // 256
    assert 1.9 < narrow.num_blocks / wide.num_blocks < 1.95
    assert narrow.times.decode_step_s(32, 32 * 8192) < wide.times.decode_step_s(32, 32 * 8192)


def test_each_policy_has_its_fleet():
    options = WorkerOptions("llama-3-8b", "H100", 1, slow_share=0.5)
    fleet = FleetOptions(prefill=2, decode=4, tpot_s=0.02)

    def workers(policy: str, chunk: int = 0) -> list[tuple[int, str, bool, int, float]]:
        setup = setup_of(replace(options, chunk=chunk), fleet, policy=policy)
        fast_s = setup.worker.times.token_s
        return [
            (
                group.count,
                roles_text(group.roles),
                group.worker.times.token_s > fast_s,
                group.worker.max_num_batched_tokens,
                group.worker.tpot_target_s,
            )
            for group in setup.groups
        ]

    assert workers("static") == [
        (1, "prefill", False, 8192, 0.0),
        (1, "prefill", True, 8192, 0.0),
        (2, "decode", False, 512, 0.0),
        (2, "decode", True, 512, 0.0),
    ]
    assert workers("collocated", 256) == [(3, "decode", False, 256, 0.0), (3, "decode", True, 256, 0.0)]
    assert workers("auto") == [(3, "prefill,decode", False, 8192, 0.02), (3, "prefill,decode", True, 8192, 0.02)]


def test_step_times_come_from_a_measured_table(tmp_path):
    truth = spec().times
    rows = [{"name": f"prefill {n}", "value": n / truth.prompt_s(n)} for n in (64, 512, 4096, 32768)]
    rows += [
        {"name": f"decode {b} at {c}", "value": b / truth.decode_step_s(b, b * c)}
        for b in (1, 8, 64)
        for c in (256, 8192)
    ]
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"results": rows}))
    times = measured(path)
    assert times.chunk_s(10_000, 0) == pytest.approx(truth.chunk_s(10_000, 0), rel=1e-3)
    assert times.decode_step_s(20, 50_000) == pytest.approx(truth.decode_step_s(20, 50_000), rel=1e-3)
    path.write_text(json.dumps({"results": rows[:2]}))
    with pytest.raises(ConfigError):
        measured(path)
