"""Each scorer does what its formula says, within [0, 1]."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.scorers import (
    SCORERS,
    ScoringContext,
    SessionTable,
    TierWeights,
    adapter_residency,
    decode_load,
    nearness,
    prefill_load,
    prefix_hit,
    stickiness,
    weights,
)
from services.router.placement.views import PlacementRequest, PrefixHits, Tier
from shared.kv.groups import KVGroups
from tests.unit.router.placement.builders import prompt, view


def test_prefill_load_is_a_half_at_its_scale():
    assert prefill_load(view(num_queued_tokens=936), ScoringContext(prompt(64), scale_tokens=1000)) == pytest.approx(
        0.5
    )
    assert prefill_load(view("w"), ScoringContext(prompt(64, w=64), scale_tokens=1000)) == pytest.approx(1000 / 1001)


def test_tokens_count_by_where_their_kv_lies():
    tiers = TierWeights(1.0, 0.5, 0.25)
    request = ScoringContext(PlacementRequest(100, KVGroups(16), PrefixHits.of({"w": 20, "other": 60}, store=80)))
    assert prefix_hit(view("w"), request, tiers) == pytest.approx((20 + 0.5 * 40 + 0.25 * 20) / 100)
    assert prefix_hit(view("other"), request, tiers) == pytest.approx((60 + 0.25 * 20) / 100)
    assert prefix_hit(view("none"), request, tiers) == pytest.approx((0.5 * 60 + 0.25 * 20) / 100)


def test_a_worker_that_has_the_adapter_ready_is_better_than_one_that_has_to_load_it():
    context = ScoringContext(PlacementRequest(100, KVGroups(16), adapter="A"))
    ready, known = view(adapters={"A": Tier.READY, "B": Tier.HOST}), view(adapters={"A": Tier.HOST})
    assert [adapter_residency(each, context) for each in (ready, known, view())] == [0.9, 0.0, 0.0]
    at_home = replace(context, homes=("w",))
    assert [adapter_residency(replace(each, name="w"), at_home) for each in (ready, known)] == [1.0, 0.5]
    (scorer,) = [each for each in SCORERS if each.name == "adapter"]
    assert scorer.applies(context)
    assert not scorer.applies(ScoringContext(prompt(100)))


def test_an_adapter_is_worth_no_queue_that_is_much_longer_than_the_shortest_one():
    context = ScoringContext(PlacementRequest(100, KVGroups(16), adapter="A"), scale_tokens=1000, least_queued=5000)
    queues = [5000, 5300, 5450, 5600, 9000]
    found = [
        adapter_residency(view(num_queued_tokens=queued, adapters={"A": Tier.READY}), context) for queued in queues
    ]
    assert found == pytest.approx([0.9, 0.9, 0.45, 0.0, 0.0])


def test_hits_shorter_than_the_least_that_counts_are_none():
    tiers = TierWeights(1.0, 0.5, 0.25)
    context = ScoringContext(prompt(100, w=20, other=19), least_hit=20, scale_tokens=100)
    for score in (
        lambda v: prefix_hit(v, context, tiers),
        lambda v: prefill_load(v, context),
        lambda v: decode_load(v, context),
    ):
        assert score(view("other")) == score(view("none")) < score(view("w"))


def test_decode_load_is_the_mean_of_free_blocks_and_places():
    assert decode_load(view(num_free_blocks=55, num_requests=4), ScoringContext(prompt(79))) == pytest.approx(
        (0.5 + 0.5) / 2
    )


def test_nearness_counts_the_leading_parts_that_labels_share():
    label = ("zone", "rack", "domain")

    def near_by(worker, near):
        return nearness(worker, ScoringContext(prompt(), near=near))

    assert near_by(view(label=label), label) == 1.0
    assert near_by(view(label=("zone", "rack", "else")), label) == pytest.approx(2 / 3)
    assert near_by(view(label=("zone",)), label) == pytest.approx(1 / 3)
    assert near_by(view(label=("else", "rack", "domain")), label) == 0.0
    assert near_by(view(), label) == 0.0
    assert near_by(view(), ()) == 0.0


def test_sessions_are_remembered_up_to_a_limit_and_a_turn_without_prefill_keeps_the_earlier_worker():
    table = SessionTable(2)
    table.note("a", "p0", "d0")
    table.note("b", "p1", "d1")
    table.note("a", "", "d2")
    table.note("c", "p3", "d3")
    assert table.last("a") == ("p0", "d2")
    assert table.last("b") == ("", "")
    assert len(table) == 2
    assert stickiness(view("d2"), ScoringContext(prompt(), last="d2")) == 1.0
    assert stickiness(view("d2"), ScoringContext(prompt(), last="")) == 0.0


@given(
    st.integers(0, 1000), st.integers(0, 20), st.integers(0, 10**6), st.integers(1, 10**6),
    st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6),
)  # fmt: skip
def test_scores_lie_between_0_and_1(free, requests, queued, num_tokens, local, peer, store):
    worker = view("w", num_free_blocks=free, num_requests=requests, num_queued_tokens=queued)
    request = PlacementRequest(num_tokens, KVGroups(16), PrefixHits({"w": local}, peer, store))
    for last, near in (("", ()), ("w", ("zone", "rack")), ("other", ("zone",))):
        context = ScoringContext(request, scale_tokens=2048, last=last, near=near)
        for scorer in SCORERS:
            assert 0.0 <= scorer.score(worker, context) <= 1.0


def test_a_weight_that_no_scorer_has_is_refused():
    assert weights(prefix=2.0)["prefix"] == 2.0
    with pytest.raises(KeyError):
        weights(prefxi=2.0)
