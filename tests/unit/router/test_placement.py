"""Placement chooses by what it states: room, queue, prefix."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.decode_load import can_hold, decode_load
from services.router.placement.policy import Choice, Placement, PlacementConfig
from services.router.placement.prefill_load import has_turn, prefill_load
from services.router.placement.prefix import prefix_hit
from services.router.placement.views import Need, WorkerView

NEED = Need(num_tokens=64, block_size=16)


def view(name="w", **changes) -> WorkerView:
    idle = WorkerView(
        name, num_free_blocks=100, num_total_blocks=100, num_requests=0, max_num_seqs=8, num_queued_tokens=0
    )
    return replace(idle, **changes)


def choose(decodes, prefills=(), collocated=False) -> Choice | None:
    return Placement(PlacementConfig()).choose(NEED, decodes, prefills, collocated=collocated)


def test_the_decode_worker_with_more_room_and_the_shorter_prefill_queue_win():
    decodes = [view("full", num_free_blocks=20), view("free")]
    prefills = [view("busy", num_queued_tokens=1000), view("idle")]
    assert choose(decodes, prefills) == Choice("free", "idle")


def test_a_prefix_hit_outweighs_a_little_load():
    decodes = [view("holder", num_hit_tokens=64, num_free_blocks=80), view("free")]
    prefills = [view("holder", num_hit_tokens=48, num_queued_tokens=20), view("idle")]
    assert choose(decodes, prefills) == Choice("holder", "holder")


def test_nobody_is_chosen_when_one_half_is_missing_or_full():
    assert choose([view()], []) is None
    assert choose([], [view()]) is None
    assert choose([view(num_free_blocks=4)], [view()]) is None
    assert choose([view(num_requests=8)], [view()]) is None
    assert choose([view(accepting=False)], [view()]) is None
    assert choose([view()], [view(num_queued_tokens=2048)]) is None


def test_an_idle_prefill_worker_takes_a_prompt_of_any_length():
    long = Need(num_tokens=100_000, block_size=16)
    assert has_turn(view(), long, 2048)
    assert not has_turn(view(num_queued_tokens=1), long, 2048)


def test_collocated_needs_no_prefill_worker():
    assert choose([view("a", num_queued_tokens=900), view("b")], collocated=True) == Choice("b", None)


def test_equal_workers_share_the_work():
    placement = Placement(PlacementConfig(), seed=1)
    decodes = [view("a"), view("b")]
    chosen = {placement.choose(NEED, decodes, [view("p")], collocated=False).decode for _ in range(30)}
    assert chosen == {"a", "b"}


views = st.builds(
    WorkerView,
    name=st.sampled_from("abcdef"),
    num_free_blocks=st.integers(0, 100),
    num_total_blocks=st.just(100),
    num_requests=st.integers(0, 10),
    max_num_seqs=st.just(8),
    num_queued_tokens=st.integers(0, 5000),
    num_hit_tokens=st.integers(0, 4).map(lambda n: 16 * n),
    accepting=st.booleans(),
)


@given(view=views, num_tokens=st.integers(1, 500))
def test_scores_lie_between_0_and_1(view, num_tokens):
    need = Need(num_tokens, 16)
    for score in (decode_load(view, need), prefill_load(view, need, 2048), prefix_hit(view, need)):
        assert 0.0 <= score <= 1.0


@given(decodes=st.lists(views, max_size=6), prefills=st.lists(views, max_size=6))
def test_only_workers_that_can_start_the_request_are_chosen(decodes, prefills):
    choice = choose(decodes, prefills)
    if choice is not None:
        assert any(v.name == choice.decode and can_hold(v, NEED) for v in decodes)
        assert any(v.name == choice.prefill and has_turn(v, NEED, 2048) for v in prefills)
    else:
        assert not any(can_hold(v, NEED) for v in decodes) or not any(has_turn(v, NEED, 2048) for v in prefills)
