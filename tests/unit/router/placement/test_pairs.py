"""Of the pairs whose requests are in time the one that leaves most of both targets; never one that cannot be."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.beside import DEFAULT_BUDGET, pace_of
from services.router.placement.decision import Route
from services.router.placement.demand import Demand
from services.router.placement.paces import prompt_rate, steady_rate, ttft_s
from services.router.placement.pairs import HAND_OFF_GAIN, QUEUED_STEPS, PairPolicy
from services.router.placement.policy import Placement, PlacementConfig
from services.router.placement.prediction import MIN_OBSERVATIONS, TtftPredictor
from services.router.placement.views import NO_HITS, PlacementRequest, Pool, Tier, Work
from shared.engine.scheduler.pacing import AIM
from shared.kv.groups import KVGroups
from shared.sizing.step_time import StepTimes
from tests.unit.router.placement.builders import pool, prompt, view

TIMES = StepTimes(1e-3, 6e-3, 2e-5, 0.0, 1e-7, 1e-9, overlap=0.5)
TARGET_S = 0.02


def worker(name: str, answers: int = 0, queued: int = 0, **changes):
    return view(
        name,
        **{"times": TIMES, **changes},
        num_requests=answers + (queued > 0),
        num_free_blocks=1000,
        num_total_blocks=1000,
        max_num_seqs=64,
        num_decoding=answers,
        num_context_tokens=500 * answers,
        num_queued_tokens=queued,
        num_queued_pairs=queued * 500.0,
        max_step_tokens=2048,
    )


def chosen(*views, request=None, preferred=None, target_s=TARGET_S, predictor=None, demand=None):
    policy = PairPolicy(target_s, predictor or TtftPredictor(), demand or Demand())
    names = {one.name for one in views} if preferred is None else preferred
    policy.look(views)
    return policy.choose(request or prompt(500), views, views, names)


def test_an_answer_joins_those_that_decode_and_its_prompt_goes_elsewhere():
    best = chosen(worker("a", answers=8), worker("b"), preferred={"a"})[0]
    assert (best.decode, best.prefill) == ("a", "b")


def test_one_worker_does_both_where_nothing_is_gained_by_two():
    best = chosen(worker("a"), worker("b", queued=4000))[0]
    assert (best.decode, best.prefill) == ("a", "a")


def test_an_answer_goes_to_a_worker_that_is_not_to_decode_where_no_other_bears_it():
    full = worker("a", answers=60)
    full.num_context_tokens = 200_000
    assert {pair.decode for pair in chosen(full, worker("b"), preferred={"a"})} == {"b"}


def test_no_pair_where_no_worker_bears_another_answer():
    full = [worker(name, answers=60) for name in "ab"]
    for one in full:
        one.num_context_tokens = 200_000
    assert chosen(*full) == ()


def test_a_first_answer_is_taken_also_where_the_target_is_out_of_reach():
    assert chosen(worker("a"), target_s=1e-6)


def test_a_worker_that_has_measured_nothing_is_taken_for_one_like_the_others():
    cold = worker("b", times=None)
    assert chosen(worker("a", answers=8), cold, preferred={"b"})[0].decode == "b"


def test_pairs_that_are_late_come_behind_those_in_time():
    request = PlacementRequest(2000, KVGroups(16), slack_s=0.2, now_s=0.0)
    pairs = chosen(worker("a", answers=4), worker("b", queued=60_000), request=request)
    assert pairs[0].in_time > 0.5
    assert min(pairs, key=lambda pair: pair.in_time).prefill == "b"


def test_no_hand_off_whose_gap_takes_more_than_the_answers_target_leaves():
    views = [worker("a", answers=8), worker("b")]
    predictor = TtftPredictor()
    assert chosen(*views, preferred={"a"}, predictor=predictor)[0].prefill == "b"
    predictor.observe_gap(Demand().output_len * TARGET_S)
    assert chosen(*views, preferred={"a"}, predictor=predictor)[0].prefill == "a"


def test_one_worker_does_both_where_the_adapter_is_ready_rather_than_where_it_is_to_be_read():
    views = worker("a", adapters={"A": Tier.FOLDER}), worker("b", queued=200, adapters={"A": Tier.READY})
    request = replace(prompt(500), slack_s=1.0)
    predictor = TtftPredictor()
    predictor.observe_adapter(3.0, Tier.FOLDER)
    assert chosen(*views, request=request, predictor=predictor)[0].decode == "a"
    pairs = chosen(*views, request=replace(request, adapter="A"), predictor=predictor)
    assert (pairs[0].decode, pairs[0].prefill) == ("b", "b")
    waits = {(pair.decode, pair.prefill): pair.ttft_s for pair in pairs}
    assert waits["a", "a"] > 3.0 > waits["b", "b"]


def test_a_prompt_goes_where_most_of_it_is_cached_although_it_has_time():
    request = replace(prompt(4000, b=3500), slack_s=100.0)
    assert chosen(worker("a"), worker("b", queued=6000), request=request)[0].prefill == "b"
    assert chosen(worker("a"), worker("b", queued=6000), request=replace(request, hits=NO_HITS))[0].prefill == "a"


def test_a_prompt_waits_for_a_nearer_pair_while_there_is_time_and_not_longer():
    far = worker("a", answers=40)
    far.num_context_tokens = 105_000  # its answers leave prompts hardly any room
    wait_s = chosen(far, request=prompt(4000))[0].ttft_s
    alone_s = TIMES.prompt_s(4000)
    assert wait_s > 8 * alone_s
    demand = Demand()  # of prompts that come with few answers: the others will have room again
    for _ in range(20):
        demand.arrived(Work.of(4000, 0), 4000, 0.0)
    for slack_s, starts in ((3 * wait_s, False), (1.5 * wait_s, True), (wait_s / 2, False), (alone_s / 2, True)):
        assert bool(chosen(far, request=replace(prompt(4000), slack_s=slack_s), demand=demand)) is starts
    near = worker("b")
    assert chosen(far, near, request=replace(prompt(4000), slack_s=3 * wait_s))[0].prefill == "b"


def test_a_prompt_does_not_wait_for_a_quicker_worker_where_answers_leave_none():
    """Short prompts with long answers: each worker computes prompts as slowly as this one, and idles if they wait."""
    busy = worker("a", answers=40)
    busy.num_context_tokens = 105_000
    demand = Demand()
    for _ in range(20):
        demand.arrived(Work.of(1000, 0), 1000, 0.0)
        demand.begin().ended(1000)
    assert chosen(busy, request=prompt(1000))[0].ttft_s > 5 * TIMES.prompt_s(1000)
    assert chosen(busy, request=replace(prompt(1000), slack_s=100.0), demand=demand)


@given(st.integers(1, 60), st.integers(100, 100_000), st.integers(2, 2000))
def test_a_prompt_beside_answers_is_never_predicted_sooner_than_without_nor_later_than_beside_them_all(
    answers, tokens, output
):
    demand = Demand()
    demand.arrived(Work.of(tokens, 0), tokens, 0.0)
    demand.begin().ended(output)
    one = worker("a", answers=answers)
    policy = PairPolicy(TARGET_S, known(), demand)
    policy.look([one])
    request = prompt(tokens)
    found_s = policy._ttft_s(one, request)
    beside_s = ttft_s(one, TIMES, request.work("a"), TARGET_S, 0.0)
    alone_s = ttft_s(worker("b"), TIMES, request.work("a"), TARGET_S, 0.0)
    assert alone_s * (1 - 1e-9) <= found_s <= beside_s * (1 + 1e-9)


def test_in_one_pool_a_hand_off_has_to_leave_most_answers_time_to_make_up_for_its_gap():
    """Of answers of 20 tokens none is in time behind a gap of five steps, whatever is gained before the first one."""
    here, other = worker("a", answers=10), worker("b", answers=10)
    for length, is_in_time in ((20, False), (2000, True)):
        demand, predictor = Demand(), TtftPredictor()
        for _ in range(50):
            demand.begin().ended(length)
        predictor.observe_gap(5 * TARGET_S)
        policy = PairPolicy(TARGET_S, predictor, demand)
        policy.look([here, other])
        request = replace(prompt(500), slack_s=1.0)
        shares = {
            decode is prefill: policy._pair(request, decode, prefill, 0.1, 0.9 * TARGET_S, ()).in_time
            for decode, prefill in ((here, here), (here, other))
        }
        assert shares[True] > 0.9
        assert (shares[False] > 0.9) is is_in_time


def test_a_cut_pair_is_not_taken():
    request = PlacementRequest(500, KVGroups(16), cut={"a": frozenset({"b"})})
    pairs = chosen(worker("a", answers=8), worker("b"), request=request, preferred={"a"})
    assert ("a", "b") not in {(pair.decode, pair.prefill) for pair in pairs}


def test_a_prompt_is_computed_beside_its_own_answer_only_where_its_steps_find_blocks():
    """Behind windows a step takes more blocks than an answer keeps."""
    request = PlacementRequest(500, KVGroups(16, (None, 32)))
    here, there = worker("a"), worker("b", queued=4000)
    assert chosen(here, there, request=request, preferred={"a"})[0].prefill == "a"
    here.num_free_blocks = request.num_blocks
    pairs = chosen(here, there, request=request, preferred={"a"})
    assert {(pair.decode, pair.prefill) for pair in pairs if pair.decode == "a"} == {("a", "b")}


def test_placement_takes_pairs_once_a_worker_knows_its_steps():
    placement = Placement(PlacementConfig(tpot_target_s=TARGET_S))
    workers = pool(worker("a", times=None), worker("b", times=None))
    for _ in range(8):  # either may be chosen: never one for each part
        first = placement.choose_pair(PlacementRequest(64, KVGroups(16), now_s=0.0), workers, workers)
        assert (first.prefill, first.route) == (None, Route.COLLOCATED)
    for one in workers:
        one.times = TIMES
    choice = placement.choose_pair(PlacementRequest(64, KVGroups(16), now_s=0.0), workers, workers)
    assert choice.pairs
    assert choice.route in (Route.SAME_WORKER, Route.HAND_OFF)
    assert (choice.prefill is None) == (choice.route is Route.SAME_WORKER)


def test_a_wait_is_the_time_in_which_all_workers_together_compute_what_is_ahead():
    predictor = TtftPredictor()
    policy = PairPolicy(TARGET_S, predictor, Demand())
    workers = pool(worker("a"), worker("b", queued=20_000))
    policy.look(workers)
    assert policy.wait_s(Work(1000), workers) is None, "no prediction was seen to hold"
    assert policy.trusted_s(1.0) is None
    for _ in range(MIN_OBSERVATIONS):
        predictor.ttft.observe(0.1, 0.1)
    assert policy.trusted_s(1.0) == 1.0
    rate = prompt_rate(worker("a"), TIMES, TARGET_S)
    assert policy.wait_s(Work(0), workers) == 0.0
    assert policy.wait_s(Work(5_000), workers) == pytest.approx(5_000 / rate, rel=0.1)
    assert policy.wait_s(Work(60_000), workers) == pytest.approx(80_000 / (2 * rate), rel=0.1)
    predictor.observe_hand_off(5.0)
    own_s = policy.idle_s(Work.of(2000, 0), workers)
    assert own_s == pytest.approx(TIMES.prompt_s(2000), rel=0.1), "an idle worker does both: nothing is handed over"


def known() -> TtftPredictor:
    predictor = TtftPredictor()
    for _ in range(MIN_OBSERVATIONS):
        predictor.ttft.observe(0.1, 0.1)
    return predictor


def test_what_first_tokens_come_later_than_predicted_is_added_to_what_requests_are_refused_by():
    predictor = TtftPredictor()
    policy, workers, own = PairPolicy(TARGET_S, predictor, Demand()), pool(worker("a"), worker("b")), Work.of(2000, 0)
    policy.look(workers)
    for _ in range(MIN_OBSERVATIONS):
        predictor.ttft.observe(0.1, 0.1)
    before_s = policy.idle_s(own, workers)
    for _ in range(100):
        predictor.ttft.observe(0.1, 0.1 + 1.5 * TARGET_S)
    assert policy.trusted_s(1.0) == pytest.approx(1.0 + 1.5 * TARGET_S)
    assert policy.idle_s(own, workers) == pytest.approx(before_s + 1.5 * TARGET_S)


def test_without_a_target_for_tpot_a_stall_adds_no_more_than_two_full_steps():
    """Seconds that a stall took would refuse all requests, and nothing would be observed that says otherwise."""
    predictor = known()
    policy, workers, own = PairPolicy(math.inf, predictor, Demand()), pool(worker("a"), worker("b")), Work.of(2000, 0)
    for _ in range(100):
        predictor.ttft.observe(0.1, 30.0)
    assert policy.trusted_s(1.0) == 1.0, "no worker's steps are known"
    policy.look(workers)
    two_steps_s = 2 * TIMES.prompt_s(DEFAULT_BUDGET)
    assert policy.trusted_s(1.0) == pytest.approx(1.0 + two_steps_s, rel=0.1)
    assert policy.idle_s(own, workers) == pytest.approx(TIMES.prompt_s(2000) + two_steps_s, rel=0.1)


def test_a_wait_counts_the_attention_of_what_is_ahead_also_where_workers_have_no_queue():
    """An idle worker has no pairs of its own; taken for none at all, waits for long prompts looked a tenth as long."""
    policy, workers = PairPolicy(TARGET_S, known(), Demand()), pool(worker("a"), worker("b"))
    policy.look(workers)
    long = Work.of(60_000, 0)
    alone_s = TIMES.prompt_s(long.tokens)
    assert alone_s > 2 * long.tokens * TIMES.token_s
    assert policy.wait_s(long, workers) == pytest.approx(alone_s / 2, rel=0.1)


def test_what_a_prompt_takes_itself_is_judged_beside_the_answers_of_the_worker_that_is_best_for_it():
    """Taken for an idle worker's, what answers take of a long prompt seemed to be a wait, and was learnt as one."""
    policy, own = PairPolicy(TARGET_S, known(), Demand()), Work.of(8000, 0)
    busy, free = worker("a", answers=60), worker("b", queued=50_000)
    policy.look([busy, free])
    alone_s = TIMES.prompt_s(own.tokens)
    assert policy.idle_s(own, pool(busy, free)) == pytest.approx(alone_s, rel=0.1), "its queue is a wait"
    beside_s = policy.idle_s(own, pool(busy))
    assert beside_s > 1.5 * alone_s
    assert beside_s == pytest.approx(chosen(busy, request=replace(prompt(8000), now_s=0.0))[0].ttft_s, rel=0.2)
    busy.accepting = free.accepting = False
    assert policy.idle_s(own, pool(busy, free)) == pytest.approx(alone_s, rel=0.1), "once one is there again"


@given(
    st.integers(1, 20_000), st.floats(1, 2000), st.floats(0, 20_000), st.floats(0.01, 0.1), st.floats(0, 1),
)  # fmt: skip
def test_at_the_steady_rate_its_answers_leave_as_much_room_and_not_much_more(prompt, output, pairs, target_s, overlap):
    times = replace(TIMES, overlap=overlap)

    def left(rate: float) -> float:
        answers = rate / prompt * output * AIM * target_s
        pace = pace_of(times, answers, answers * 1000, pairs, target_s, 2048, 2048)
        return pace.tokens_a_second if pace.decode_s <= target_s else 0.0

    rate = steady_rate(times, pairs, target_s, 2048, prompt, output, 1000)
    assert left(rate) >= rate
    assert left(rate + 100) < rate + 100, "but for what halving ten times leaves of the rate without answers"
    assert steady_rate(times, pairs, target_s, 2048, prompt, 2 * output, 1000) <= rate + 100


def test_a_wait_that_is_longer_than_the_answers_beside_it_does_not_go_on_as_slowly():
    """At this moment both are full; answers are short, and so few begin that none is left after some steps."""
    demand = Demand()
    for _ in range(40):
        demand.arrived(Work.of(4000, 0), 4000, 0.0)
        demand.begin().ended(20)
    full = [worker(name, answers=60) for name in "ab"]
    for one in full:
        one.num_context_tokens = 110_000
    ahead, life_s = Work.of(4000, 0), 19 * TARGET_S
    waits = {}
    for preferred in (("a", "b"), ("a",)):
        policy = PairPolicy(TARGET_S, known(), demand)
        policy.look(full, preferred)
        waits[preferred] = policy.wait_s(Work(10 * ahead.tokens, 10 * ahead.pairs), pool(*full))
    slow_s = 10 * ahead.tokens / (2 * prompt_rate(full[0], TIMES, TARGET_S, ahead.pairs / ahead.tokens))
    free_s = 10 * TIMES.prompt_s(4000) / 2
    assert slow_s > 4 * free_s
    for wait_s in waits.values():
        assert life_s < wait_s < slow_s / 2
    assert waits["a", "b"] > free_s


@pytest.mark.parametrize("answers", [0, 8])
def test_waits_are_predicted_where_no_answer_can_be_in_time(answers):
    # Steps of one answer take longer than the target, so that no rate goes on beside answers: not a division by it.
    policy = PairPolicy(1e-4, known(), Demand())
    workers = pool(worker("a", answers=answers, queued=3000), worker("b", answers=answers))
    policy.look(workers)
    assert policy.idle_s(Work.of(500, 0), workers) > 0
    assert policy.wait_s(Work.of(5000, 0), workers) > 0


def test_a_worker_takes_no_further_prompt_behind_more_than_some_steps_or_a_long_prompt():
    demand, predictor = Demand(), TtftPredictor()
    policy = PairPolicy(TARGET_S, predictor, demand)
    policy.look([worker("a")])
    in_steps = QUEUED_STEPS * TARGET_S * prompt_rate(worker("a", queued=1), TIMES, TARGET_S)
    assert policy.has_time(worker("a", queued=int(0.9 * in_steps)), 0)
    assert not policy.has_time(worker("a", queued=int(1.1 * in_steps)), 0)
    assert policy.has_time(worker("a", queued=int(1.1 * in_steps)), 0.2 * in_steps), "a part of it lies there already"
    assert not policy.has_time(worker("a", answers=60, queued=int(0.9 * in_steps)), 0), "beside answers it is slower"
    for _ in range(20):
        demand.arrived(Work.of(int(2 * in_steps), 0), 8000, 1.0)
    assert policy.has_time(worker("a", queued=int(2.4 * in_steps)), 0), "with long prompts one may wait"
    assert not policy.has_time(worker("a", queued=int(2.6 * in_steps)), 0)
    assert PairPolicy(math.inf, predictor, demand).has_time(worker("a"), 0)


@given(
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, 8000), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 4000),
    st.floats(0.001, 10) | st.just(math.inf),
    st.floats(0.005, 0.1) | st.just(math.inf),
)
def test_a_pair_never_breaks_a_limit(states, num_tokens, slack_s, target_s):
    views = [worker(f"w{n}", answers, queued, in_shard=own) for n, (answers, queued, own) in enumerate(states)]
    request = PlacementRequest(num_tokens, KVGroups(16), slack_s=slack_s)
    by_name = {one.name: one for one in views}
    pairs = chosen(*views, request=request, target_s=target_s)
    for pair in pairs:
        decode = by_name[pair.decode]
        context = (decode.num_context_tokens + num_tokens) / (decode.num_decoding + 1)
        assert pair.tpot_s <= TIMES.most_step_s(target_s, context) or not decode.num_decoding
        assert request.num_missing_blocks(decode.name) + decode.num_requests <= decode.num_free_blocks
        assert 0 <= pair.in_time <= 1
        assert pair.prefill in by_name
    assert len({(pair.decode, pair.prefill) for pair in pairs}) == len(pairs)


def waits_for(*views, displaced=None, delayed=None, is_pure=False, slack_s=1.0, preferred=("a",)):
    policy = PairPolicy(TARGET_S, TtftPredictor(), Demand())
    policy.look(views, preferred)
    policy.displaced, policy.delayed, policy.is_pure = displaced or {}, delayed or {}, is_pure
    request = replace(prompt(500), slack_s=slack_s)
    decodes = [view for view in views if policy.may_decode(view, request)]
    prefills = [view for view in views if policy.may_prefill(view, request) and policy.has_time(view, 0)]
    return policy.choose(request, decodes, prefills, preferred)


def test_a_request_waits_for_a_worker_that_is_to_decode_where_another_would_lose_more():
    full = worker("a", answers=60)
    full.num_context_tokens = 200_000
    assert waits_for(full, worker("b"), displaced={"b": 0.5})[0].decode == "b"
    assert waits_for(full, worker("b"), displaced={"b": 20.0}) == ()
    assert waits_for(full, worker("b"), displaced={"b": 20.0}, slack_s=math.inf)[0].decode == "b"


def test_an_answer_does_not_go_where_it_is_quicker_but_displaces_prompts():
    views = worker("a", answers=60), worker("b")
    views[0].num_context_tokens = 95_000
    assert waits_for(*views, displaced={"b": 0.0}, slack_s=100.0)[0].decode == "b"
    assert waits_for(*views, displaced={"b": 0.9}, slack_s=100.0)[0].decode == "a"


def test_a_prompt_goes_behind_others_rather_than_take_the_place_of_answers():
    views = worker("a", answers=8), worker("b", queued=3000)
    assert waits_for(*views)[0].prefill == "a"
    assert waits_for(*views, delayed={"a": 0.5})[0].prefill == "b"


def test_a_prompt_that_would_take_the_place_of_answers_waits_while_a_worker_that_prefills_is_in_time():
    views = worker("a", answers=8), worker("b", queued=8000)  # 0.2 s, more than four steps of 20 ms
    assert waits_for(*views)[0].prefill == "a"
    assert waits_for(*views, delayed={"a": 0.5}) == ()
    assert waits_for(*views, delayed={"a": 0.5}, slack_s=0.3)[0].prefill == "a", "it waits for half of its slack"
    assert waits_for(*views, delayed={"a": 0.5}, slack_s=math.inf)[0].prefill == "a"


def test_in_a_pure_split_prompts_go_beside_no_answers():
    busy, queued = worker("a", answers=8), worker("b", queued=3000)
    assert {pair.prefill for pair in waits_for(busy, queued)} == {"a", "b"}
    assert {pair.prefill for pair in waits_for(busy, queued, is_pure=True)} == {"b"}
    assert "a" in {pair.prefill for pair in waits_for(worker("a"), queued, is_pure=True)}


def test_where_every_worker_does_both_a_hand_off_has_to_give_clearly_more():
    """It takes processor time that no prediction has."""
    busy = worker("a", answers=40)
    busy.num_context_tokens = 105_000  # hardly any room for prompts
    one = worker("b", answers=44)
    one.num_context_tokens = 105_000
    idle = worker("c")
    views = [busy, one, idle]
    request = replace(prompt(2000), slack_s=0.3)
    everyone = chosen(*views, request=request)
    assert all(pair.decode == pair.prefill for pair in everyone)
    policy = PairPolicy(TARGET_S, TtftPredictor(), Demand())
    policy.look(views)
    names = {view.name for view in views}
    apart = policy.choose(request, [busy, one], views, names)  # the idle one has no room for an answer
    assert apart[0].prefill == "c", "most come in time only with it"
    split = policy.choose(request, views, views, {"a", "b"})
    assert any(pair.decode != pair.prefill for pair in split), "a split was weighed when it was chosen"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4000)), min_size=2, max_size=5), st.floats(0.01, 2.0))
def test_every_pair_of_workers_that_do_both_is_one_of_them_or_gives_more(loads, slack_s):
    views = [worker(f"w{n}", answers=answers, queued=queued) for n, (answers, queued) in enumerate(loads)]
    pairs = chosen(*views, request=replace(prompt(500), slack_s=slack_s))
    here = [pair.in_time for pair in pairs if pair.decode == pair.prefill]
    if here and any(pair.decode != pair.prefill for pair in pairs):
        assert max(pair.in_time for pair in pairs) > max(here) + HAND_OFF_GAIN


@st.composite
def events(draw):
    """(what happens, to which of the workers, a number)."""
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from(("report", "measured", "commit", "slack", "full", "request")),
                st.integers(0, 5),
                st.integers(1, 60),
            ),
            max_size=40,
        )
    )


def _happen(what: str, views: Pool, place: int, number: int, now_s: float) -> None:
    one = list(views)[place]
    if what == "report":
        one.num_decoding, one.num_context_tokens, one.num_promised = number, 400 * number, 0
        one.num_queued_tokens, one.num_queued_pairs, one.reported_s = 30 * (number % 7), 9000.0 * (number % 7), now_s
    elif what == "measured":
        views.version += one.times is None  # as a worker's standing does
        one.times = replace(TIMES, token_s=1e-6 * number, fixed_s=1e-4 * number)
    elif what == "commit":
        one.num_decoding, one.num_promised = one.num_decoding + 1, one.num_promised + 1
        one.num_context_tokens, one.num_promised_tokens = one.num_context_tokens + 10, one.num_promised_tokens + 10
    elif what == "slack":
        one.least_slack_s = number / 1000
    elif what == "full":
        one.accepting, one.max_step_tokens = not one.accepting, 64 * number


@given(events(), st.integers(0, 6))
def test_decisions_are_those_that_nothing_kept_would_give(happened, num_measured):
    """What is kept of a view's answers, and which worker is typical, is not to be seen in any choice or wait."""

    def fleet():
        return pool(*(worker(f"w{i}", answers=4 * i, times=TIMES if i < num_measured else None) for i in range(6)))

    def placement():
        made = Placement(PlacementConfig(tpot_target_s=TARGET_S, ttft_target_s=1.0))
        for _ in range(MIN_OBSERVATIONS):
            made.predictor.ttft.observe(1.0, 1.0)
        for number in range(12):
            made.split.demand.arrived(Work.of(400 + number, 0), 400 + number, 0.1 * number)
        return made

    kept, forgotten, one_fleet, other_fleet = placement(), placement(), fleet(), fleet()
    now_s = 2.0
    for what, place, number in [*happened, ("request", 0, 10)]:
        now_s += 0.05
        for views in (one_fleet, other_fleet):
            _happen(what, views, place, number, now_s)
        if what != "request":
            continue
        for one in other_fleet:
            one.known = None
        other_fleet.version += 1
        request = PlacementRequest(40 * number, KVGroups(16), slack_s=number / 30, now_s=now_s)
        chosen = [
            one.choose_pair(request, views, views) for one, views in ((kept, one_fleet), (forgotten, other_fleet))
        ]
        assert chosen[0] == chosen[1]
        assert (chosen[0] and chosen[0].pairs) == (chosen[1] and chosen[1].pairs)
        assert kept.pairs.wait_s(Work(), one_fleet) == forgotten.pairs.wait_s(Work(), other_fleet)
        own = Work.of(40 * number, 0)
        assert kept.pairs.idle_s(own, one_fleet) == forgotten.pairs.idle_s(own, other_fleet)


def test_the_typical_worker_is_looked_for_anew_where_others_are_to_decode_or_it_knows_nothing():
    slow, quick = (worker(name, times=replace(TIMES, token_s=token_s)) for name, token_s in (("a", 2e-5), ("b", 1e-5)))
    policy, both, first = PairPolicy(TARGET_S, TtftPredictor(), Demand()), pool(slow, quick), frozenset("a")
    policy.look(both, first, both.version)
    assert policy.typical is quick.times
    policy.look(both, frozenset("b"), both.version)
    assert policy.typical is slow.times
    policy.look(both, first, both.version)
    quick.times = None
    policy.look(both, first, both.version)
    assert policy.typical is slow.times


@pytest.mark.timing
def test_a_pair_among_a_thousand_workers_is_chosen_in_less_than_a_millisecond():
    rng = random.Random(1)
    views = [
        worker(f"w{n}", answers=rng.randint(5, 40), queued=rng.choice((0, 0, 1500)), least_slack_s=rng.uniform(0, 0.05))
        for n in range(1000)
    ]
    workers, placement = pool(*views), Placement(PlacementConfig(tpot_target_s=0.025, ttft_target_s=1.0, explain=False))
    for number in range(100):
        placement.split.demand.arrived(Work.of(800, 200), 1000, 0.01 * number)
    costs = []
    for number in range(550):
        for place in rng.sample(range(len(views)), 20):  # so many report meanwhile
            _happen("report", workers, place, rng.randint(5, 40), 1.0 + number / 1000)
        request = PlacementRequest(rng.randint(300, 2000), KVGroups(16), slack_s=1.0, now_s=1.0 + number / 1000)
        begin = time.thread_time()
        placement.choose_pair(request, workers, workers)
        costs.append(time.thread_time() - begin)
    assert sorted(costs)[len(costs) // 10] < 1e-3  # the quiet moments of a shared machine
