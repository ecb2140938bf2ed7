"""Placement chooses by what it states: room, queue, prefix, place, session."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.decision import Choice, Route, Thresholds
from services.router.placement.filters import can_hold, has_queue_room
from services.router.placement.policy import Placement, PlacementConfig
from services.router.placement.prediction import TtftPredictor
from services.router.placement.views import NO_WORK, PlacementRequest, PrefixHits, Work, WorkerView
from shared.kv.groups import KVGroups
from tests.unit.router.placement.builders import pool, prompt, view


def choose(decodes, prefills=(), request=None, *, collocated=False, **config) -> Choice | None:
    placement = Placement(PlacementConfig(**config))
    return placement.choose(request or prompt(), pool(*decodes), pool(*prefills), collocated=collocated)


def test_the_decode_worker_with_more_room_and_the_shorter_prefill_queue_win():
    decodes = [view("full", num_free_blocks=20), view("free")]
    prefills = [view("busy", num_queued_tokens=1000), view("idle")]
    assert choose(decodes, prefills) == Choice("free", "idle")


def test_a_prefix_hit_outweighs_a_little_load():
    decodes = [view("d0", num_free_blocks=80), view("free")]
    prefills = [view("p0", num_queued_tokens=20), view("idle")]
    assert choose(decodes, prefills, prompt(d0=64, p0=48)) == Choice("d0", "p0")


def test_workers_that_lack_what_all_prompts_begin_with_have_long_prompts_too():
    decodes, prefills = [view("d"), view("new-d")], [view("p"), view("new-p")]

    def chosen(request: PlacementRequest, **config: float) -> set[Choice]:
        placement = Placement(PlacementConfig(**config))
        pools = pool(*decodes), pool(*prefills)
        return {placement.choose(request, *pools, collocated=False) for _ in range(50)}

    short_hit, long_hit = prompt(1024, d=112, p=112), prompt(1024, d=128, p=128)
    assert len(chosen(short_hit)) == 4
    assert chosen(long_hit) == chosen(short_hit, min_hit_share=0.0) == {Choice("d", "p")}


def test_a_pair_that_is_cut_is_not_chosen_and_both_serve_with_others():
    decodes, prefills = [view("d0"), view("d1", num_free_blocks=20)], [view("p0"), view("p1", num_queued_tokens=1000)]
    assert choose(decodes, prefills) == Choice("d0", "p0")
    one = replace(prompt(), cut={"d0": frozenset({"p0"})})
    assert choose(decodes, prefills, one) == Choice("d0", "p1")
    both = replace(prompt(), cut={"d0": frozenset({"p0", "p1"})})
    assert choose(decodes, prefills, both) == Choice("d1", "p0")


def test_a_decode_worker_that_no_prefill_worker_reaches_computes_the_prompt():
    cut = replace(prompt(), cut={"d": frozenset({"p"})})
    choice = choose([view("d")], [view("p")], cut)
    assert choice == Choice("d", None)
    assert choice.route is Route.NO_PREFILL
    assert choose([view("d", num_queued_tokens=10_000)], [view("p")], cut) is None
    assert choose([view("d")], [view("p"), view("full", num_queued_tokens=10_000)], cut) is None


def test_a_decode_worker_computes_a_short_prompt_only_where_its_steps_find_blocks():
    """Behind windows a step takes more blocks than an answer keeps."""
    request = PlacementRequest(500, KVGroups(16, (None, 32)))
    for num_free, prefill in ((100, None), (request.num_blocks, "p")):
        one = view("d", num_free_blocks=num_free, max_step_tokens=2048)
        short = Thresholds(short_suffix_tokens=1000)
        assert choose([one], [view("p")], request, thresholds=short) == Choice("d", prefill)
        both = [view("p", num_queued_tokens=1000), one]  # "d" has both roles
        assert choose([one], both, request, thresholds=Thresholds(0)) == Choice("d", prefill)
        assert choose([one], [one], request, thresholds=short) == (None if prefill else Choice("d", None))


def test_a_holder_whose_queue_would_make_it_late_is_passed_by():
    placement = Placement(PlacementConfig(), predictor=trained())
    prefills = pool(view("p0", num_queued_tokens=1000), view("p1"))
    request = prompt(640, p0=624)
    decodes = pool(view("d"))
    assert placement.choose(request, decodes, prefills, collocated=False).prefill == "p0"
    hurried = replace(request, slack_s=0.8)
    assert placement.choose(hurried, decodes, prefills, collocated=False).prefill == "p1"


def test_a_request_waits_for_a_queue_in_time_rather_than_be_late_in_one_with_room():
    placement = Placement(PlacementConfig(), predictor=TtftPredictor())
    for n in range(1, 20):
        work = Work(50 * n, 50e3 * n * (n % 5))
        placement.predictor.observe_prefill(NO_WORK, work, 1e-4 * work.tokens + 1e-6 * work.pairs)
    long, decodes = view("long", num_queued_tokens=2000, num_queued_pairs=4e6), pool(view("d"))
    prefills = pool(long, view("soon", num_queued_tokens=2100))  # no room yet

    def chosen(slack_s: float, prefills=prefills, **changes) -> str | None:
        request = replace(prompt(100), slack_s=slack_s, **changes)
        choice = placement.choose(request, decodes, prefills, collocated=False)
        return choice.prefill if choice is not None else None

    long_s = placement.predictor.pool_s(long, prompt(100))
    soon_s = placement.predictor.pool_s(view("soon", num_queued_tokens=2100), prompt(100))
    assert soon_s < long_s
    between_s = (soon_s + long_s) / 2
    assert chosen(2 * long_s) == "long"
    assert chosen(between_s) is None
    assert chosen(soon_s / 2) == "long"  # which admission refuses: nothing is in time
    assert chosen(between_s, excluded=frozenset({"soon"})) == "long"
    assert chosen(between_s, pool(long, view("soon", num_queued_tokens=100))) == "soon"


def test_collocated_needs_no_prefill_worker():
    chosen = choose([view("a", num_queued_tokens=900), view("b")], collocated=True)
    assert chosen == Choice("b", None)
    assert chosen.route is Route.COLLOCATED


def test_equal_workers_share_the_work():
    placement = Placement(PlacementConfig(), seed=1)
    decodes, prefills = pool(view("a"), view("b")), pool(view("p"))
    chosen = {placement.choose(prompt(), decodes, prefills, collocated=False).decode for _ in range(30)}
    assert chosen == {"a", "b"}


def test_the_nearer_prefill_worker_breaks_a_tie():
    decode = view("d", label=("zone-a", "rack-1"))
    prefills = [
        view("far", label=("zone-b", "rack-1")), view("near", label=("zone-a", "rack-1")), view("somewhere"),
    ]  # fmt: skip
    assert choose([decode], prefills) == Choice("d", "near")


def test_a_conversation_returns_to_its_workers_without_an_index():
    placement = Placement(PlacementConfig(), seed=3)
    decodes, prefills = pool(*(view(f"d{n}") for n in range(8))), pool(*(view(f"p{n}") for n in range(8)))
    first = placement.choose(prompt(session="s"), decodes, prefills, collocated=False)
    for _ in range(10):
        assert placement.choose(prompt(session="s"), decodes, prefills, collocated=False) == first
    others = {placement.choose(prompt(), decodes, prefills, collocated=False).prefill for _ in range(30)}
    assert len(others) > 3


def trained(prefill_s=1e-3, here_s=2e-3) -> TtftPredictor:
    predictor = TtftPredictor()
    for n in range(1, 20):
        predictor.observe_prefill(NO_WORK, Work.of(n * 50, 0), n * 50 * prefill_s)
        predictor.observe_here(NO_WORK, Work.of(n * 50, 0), n * 50 * here_s)
    return predictor


def test_a_short_suffix_is_prefilled_where_it_decodes():
    thresholds = Thresholds(short_suffix_tokens=16)
    chosen = choose([view("d")], [view("p")], prompt(d=48), thresholds=thresholds)
    assert chosen == Choice("d", None)
    assert chosen.route is Route.SHORT_SUFFIX
    assert choose([view("d")], [view("p")], prompt(d=32), thresholds=thresholds) == Choice("d", "p")
    assert choose([view("d")], [view("p")], prompt(d=48)) == Choice("d", "p")


def test_a_prefill_pool_that_is_behind_is_passed_by():
    config = PlacementConfig(thresholds=Thresholds(max_here_tokens=100), max_queued_tokens=2048)
    placement = Placement(config, predictor=trained())
    for queued, expected in ((0, Route.HAND_OFF), (1000, Route.POOL_SLOWER), (5000, Route.POOL_SLOWER)):
        chosen = placement.choose(
            prompt(), pool(view("d")), pool(view("p", num_queued_tokens=queued)), collocated=False
        )
        assert chosen.route is expected
    # A decode worker that prefills enough already is left alone.
    busy = pool(view("d", num_queued_tokens=90))
    assert placement.choose(prompt(), busy, pool(view("p", num_queued_tokens=5000)), collocated=False) is None


def test_every_choice_can_be_explained():
    chosen = choose([view("d0"), view("d1")], [view("p0"), view("p1", num_queued_tokens=500)], prompt(p0=32, d1=16))
    assert {c.name for c in chosen.decodes} == {"d0", "d1"}
    assert [c.name for c in chosen.prefills] == ["p0", "p1"]
    best = next(iter(chosen.prefills))
    assert dict(best.parts).keys() == {"queue", "prefix"}
    assert best.score == sum(value for _, value in best.parts) / 2
    assert best.num_hit_tokens == 32
    assert list(choose([view("d0")], [view("p0")], explain=False).prefills) == []


def test_a_large_fleet_is_sampled_but_its_holders_are_seen():
    decodes = pool(*(view(f"d{n}") for n in range(500)))
    prefills = pool(*(view(f"p{n}") for n in range(500)))
    placement = Placement(PlacementConfig(max_candidates=16))
    chosen = placement.choose(prompt(640, p321=624), decodes, prefills, collocated=False)
    assert chosen.prefill == "p321"
    assert len(list(chosen.decodes)) <= 16
    counts = Counter(placement.choose(prompt(), decodes, prefills, collocated=False).prefill for _ in range(300))
    assert len(counts) > 150


def test_the_only_worker_with_room_is_found_in_a_large_fleet():
    decodes = pool(*(view(f"d{n}", accepting=n == 77) for n in range(300)))
    prefills = pool(*(view(f"p{n}", num_queued_tokens=0 if n == 123 else 9999) for n in range(300)))
    placement = Placement(PlacementConfig(max_candidates=8))
    assert placement.choose(prompt(), decodes, prefills, collocated=False) == Choice("d77", "p123")


@pytest.mark.timing
def test_a_decision_among_a_thousand_workers_takes_less_than_a_millisecond():
    decodes = pool(*(view(f"d{n}", num_free_blocks=100_000, num_total_blocks=100_000) for n in range(1000)))
    prefills = pool(*(view(f"p{n}", num_queued_tokens=n) for n in range(1000)))
    placement = Placement(PlacementConfig())
    local = {f"{role}{n}": 512 for role in "pd" for n in range(1000)}  # the system prompt that everyone holds
    request = PlacementRequest(12_000, KVGroups(16), PrefixHits.of({**local, "p7": 6000, "d9": 6000}))
    costs = []
    for _ in range(200):
        begin = time.perf_counter()
        placement.choose(request, decodes, prefills, collocated=False)
        costs.append(time.perf_counter() - begin)
    assert sorted(costs)[20] < 1e-3  # the quiet moments of a shared machine


views = st.builds(
    view,
    name=st.sampled_from("abcdef"),
    num_free_blocks=st.integers(0, 100),
    num_requests=st.integers(0, 10),
    num_queued_tokens=st.integers(0, 5000),
    accepting=st.booleans(),
    label=st.lists(st.sampled_from("xy"), max_size=3).map(tuple),
)
hits = st.dictionaries(st.sampled_from("abcdefABCDEF"), st.integers(0, 4).map(lambda n: 16 * n), max_size=6)


def upper(one: WorkerView) -> WorkerView:
    one.name = one.name.upper()
    return one


@given(
    decodes=st.lists(views, max_size=6),
    prefills=st.lists(views.map(upper), max_size=6),
    local=hits,
    limit=st.integers(2, 8),
    tie_margin=st.floats(0, 0.3),
)
def test_only_workers_that_can_start_the_request_are_chosen_and_one_is_whenever_one_can(
    decodes, prefills, local, limit, tie_margin
):
    request = prompt(64, **local)
    placement = Placement(PlacementConfig(max_candidates=limit, tie_margin=tie_margin))
    all_decodes, all_prefills = pool(*decodes), pool(*prefills)
    choice = placement.choose(request, all_decodes, all_prefills, collocated=False)
    able_decodes = {v.name for v in all_decodes if can_hold(v, request)}
    able_prefills = {v.name for v in all_prefills if has_queue_room(v, request, 2048)}
    assert (choice is not None) == (bool(able_decodes) and bool(able_prefills))
    if choice is not None:
        assert choice.decode in able_decodes
        assert choice.prefill in able_prefills
        for candidate in (*choice.decodes, *choice.prefills):
            assert -1e-9 <= candidate.score <= 1 + 1e-9
            assert all(0 <= value <= 1 for _, value in candidate.parts)


def test_a_retry_goes_to_another_worker_than_the_one_that_failed_though_it_holds_the_prefix_and_the_session():
    placement = Placement(PlacementConfig())
    decodes, prefills = pool(view("d0"), view("d1")), pool(view("p0"), view("p1"))
    first = prompt(640, "chat", d0=624, p0=624)
    assert placement.choose(first, decodes, prefills, collocated=False) == Choice("d0", "p0")
    again = replace(first, excluded=frozenset({"d0", "p0"}))
    assert placement.choose(again, decodes, prefills, collocated=False) == Choice("d1", "p1")


def test_a_retry_returns_to_the_worker_that_failed_only_where_its_pool_has_no_other():
    request = replace(prompt(), excluded=frozenset({"d0", "p0"}))
    assert choose([view("d0")], [view("p0")], request) == Choice("d0", "p0")
    full = view("d1", num_free_blocks=0)
    assert choose([view("d0"), full], [view("p0")], request) is None  # it waits for the other rather than return


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef"), min_size=1), st.integers(1, 8))
def test_no_excluded_worker_is_chosen_while_there_are_others(excluded, names, limit):
    request = replace(prompt(640, **dict.fromkeys(names, 320)), excluded=frozenset(excluded))
    placement = Placement(PlacementConfig(max_candidates=max(2, limit)))
    choice = placement.choose(request, pool(*map(view, sorted(names))), pool(), collocated=True)
    assert choice is not None
    assert choice.decode not in excluded or names <= excluded


def test_workers_that_take_no_requests_leave_no_other_choice():
    once = replace(prompt(), excluded=frozenset({"a"}))
    away = view("b", accepting=False)
    assert Placement(PlacementConfig()).choose(once, pool(view("a"), away), pool(), collocated=True) == Choice(
        "a", None
    )
    assert choose([view("a"), away], [view("p"), view("q", accepting=False)], once) == Choice("a", "p")
    cut = replace(prompt(), cut={"a": frozenset({"p"})})
    assert choose([view("a")], [view("p"), view("q", accepting=False)], cut).route is Route.NO_PREFILL


@pytest.mark.parametrize(("queued", "route"), [(0, Route.SHORT_SUFFIX), (84, Route.SHORT_SUFFIX), (85, Route.HAND_OFF)])
def test_what_a_decode_worker_has_to_prefill_already_counts_with_a_short_suffix(queued, route):
    busy = view("d", num_queued_tokens=queued)
    chosen = choose([busy], [view("p")], prompt(d=48), thresholds=Thresholds(short_suffix_tokens=100))
    assert chosen.route is route
