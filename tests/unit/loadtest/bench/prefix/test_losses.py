"""Each cause of a shortfall alone."""

from __future__ import annotations

from loadtest.bench.prefix.ideal import Losses, Served, find_losses, ideal_hit_tokens
from loadtest.bench.prefix.prompts import BLOCK_SIZE, make_prompt

FIRST = make_prompt(range(65), 1)  # four blocks and a token
OTHER = make_prompt(range(100, 165), 1)
HIT = 4 * BLOCK_SIZE


def losses(served: list[Served], pool_blocks: int, num_pools: int, num_fetched_tokens: int = 0) -> Losses:
    ideal = ideal_hit_tokens([item.prompt for item in served], num_pools * pool_blocks, BLOCK_SIZE)
    return find_losses(served, ideal, num_fetched_tokens, pool_blocks, BLOCK_SIZE)


def test_a_fleet_that_does_all_right_loses_nothing():
    served = [Served(FIRST, "a", 0), Served(OTHER, "b", 0), Served(FIRST, "a", HIT), Served(OTHER, "b", HIT)]
    assert losses(served, 4, 2) == Losses(0, 0, 0)


def test_a_prompt_beside_the_worker_that_holds_it_is_lost_to_placement():
    assert losses([Served(FIRST, "a", 0), Served(FIRST, "b", 0)], 8, 2) == Losses(0, HIT, 0)


def test_prompts_that_all_went_to_one_small_pool_are_lost_to_the_split():
    served = [Served(FIRST, "a", 0), Served(OTHER, "a", 0), Served(FIRST, "a", 0)]
    assert losses(served, 4, 2) == Losses(HIT, 0, 0)


def test_a_prompt_that_its_worker_should_have_held_is_lost_to_timing():
    assert losses([Served(FIRST, "a", 0), Served(FIRST, "a", 0)], 8, 1) == Losses(0, 0, HIT)


def test_what_was_fetched_is_no_hit_of_the_pool():
    served = [Served(FIRST, "a", 0), Served(FIRST, "b", HIT)]
    assert losses(served, 8, 2, num_fetched_tokens=HIT) == Losses(0, HIT, 0)
