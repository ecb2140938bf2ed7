"""The prefix benchmark over real clusters of one worker a pool."""

from __future__ import annotations

import pytest

from loadtest.bench.prefix.fleet import Setup, write_tiny_model
from loadtest.bench.prefix.ideal import make_prompt
from loadtest.bench.prefix.measure import hit_table, measure_hits, measure_ttft, ttft_setups, ttft_table
from loadtest.workloads.tokens import Span, TokenSource

pytestmark = pytest.mark.slow

SOURCE = TokenSource(0, 3000)


async def test_one_worker_asked_in_order_hits_what_one_cache_does(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    topics = [SOURCE.span(Span(f"topic/{i}", 160)) for i in range(6)]
    asked = [topics[i % 6 if i < 18 else i % 2] + SOURCE.span(Span(f"turn/{i}", 20)) for i in range(30)]
    run = await measure_hits(Setup("one", model, 1, 48), [make_prompt(tokens, 2) for tokens in asked], 1, 60.0)
    assert run.num_requests == 30
    assert 0 < run.num_hit_tokens == run.places["local"] == run.num_ideal_tokens
    assert "| one | 30 | 5,400 |" in hit_table([run])


async def test_a_prefix_that_left_the_pools_comes_from_the_store():
    setup = next(setup for setup in ttft_setups() if setup.name == "store, fetch only")
    for attempt in range(3):  # a busy store does not take what it is offered once
        run = await measure_ttft(setup, 2, TokenSource(attempt, 3000))
        if all(outcome.num_cached_tokens == 960 for outcome in run.returned):
            break
    assert len(run.returned) == len(run.fresh) == 2
    assert all(outcome.num_cached_tokens == 960 for outcome in run.returned)
    assert all(outcome.num_cached_tokens == 0 for outcome in run.fresh)
    assert run.ttft_s > 0
    assert "| store, fetch only |" in ttft_table([run])
