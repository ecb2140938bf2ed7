"""What the newest requests and answers are like beyond their mean."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.demand import Demand
from services.router.placement.views import Work


def cost(own: Work) -> float:
    return own.tokens + 1e-3 * own.pairs


@given(st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 50_000)), min_size=1, max_size=60))
def test_the_cheapest_are_fewer_and_cheaper_from_share_to_share(prompts):
    demand = Demand()
    for number, (uncached, cached) in enumerate(prompts):
        demand.arrived(Work.of(uncached, cached), uncached + cached, number * 0.01)
    found = demand.cheapest(1.0, cost)
    assert found[0] == (1.0, demand.mix(1.0))
    shares = [share for share, _ in found]
    assert shares == sorted(shares, reverse=True)
    for (share, mix), (less, cheaper) in pairwise(found):
        assert cheaper.rate / less == pytest.approx(mix.rate / share)
        assert cost(cheaper.prompt) <= cost(mix.prompt) * (1 + 1e-6) + 1.0, "to a whole token"


def test_without_the_one_that_has_most_of_the_work_the_others_are_left():
    demand = Demand()
    for _ in range(5):
        for tokens in (*[100] * 19, 100_000):
            demand.arrived(Work.of(tokens, 0), tokens, 0.0)
    mix = dict(demand.cheapest(0.0, cost))[0.95]
    assert mix.prompt.tokens == pytest.approx(100, rel=0.02)
    assert mix.prompt.pairs == pytest.approx(5000, rel=0.02)
    assert mix.num_prompt_tokens == pytest.approx(100, rel=0.02)


def test_of_requests_that_cost_the_same_each_share_is_like_all():
    demand = Demand()
    for tokens in range(100, 200):
        demand.arrived(Work.of(tokens, 0), tokens, 0.0)
    whole, *parts = demand.cheapest(0.0, lambda own: max(1000.0, cost(own)))
    for share, mix in parts:
        assert mix.prompt == whole[1].prompt
        assert mix.rate == pytest.approx(share * whole[1].rate)


def test_before_anything_came_there_is_nothing_to_leave_out():
    assert [share for share, _ in Demand().cheapest(0.0, cost)] == [1.0]


@given(st.floats(0.5, 500))
def test_answers_of_one_token_have_no_gap_to_be_late_by(num_gaps):
    demand = Demand()
    for length in (1, 1, 1, 101):
        demand.begin().ended(length)
    assert demand.share_with_gaps(num_gaps) == pytest.approx(1.0 if num_gaps <= 95 else 0.75, abs=0.25)
    assert demand.share_with_gaps(num_gaps) >= 0.75
