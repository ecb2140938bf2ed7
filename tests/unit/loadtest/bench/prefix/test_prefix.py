"""The prefix benchmark's own arithmetic: the ideal cache, and each cause of a shortfall alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.bench.prefix.ideal import Losses, PrefixLru, Served, find_losses, ideal_hit_tokens
from loadtest.bench.prefix.prompts import BLOCK_SIZE, make_prompt


class NaiveLru:
    """Sorts all blocks by (last use, depth) whenever it is asked."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[tuple[int, int, bytes]] = []  # (last use, minus depth, block): the largest stay
        self.clock = 0

    def num_hit_blocks(self, hashes) -> int:
        held = {name for _, _, name in self.blocks}
        count = 0
        while count < len(hashes) and hashes[count] in held:
            count += 1
        return count

    def use(self, hashes) -> None:
        self.clock += 1
        others = [block for block in self.blocks if block[2] not in hashes]
        used = [(self.clock, -depth, name) for depth, name in enumerate(hashes)]
        self.blocks = sorted(others + used, reverse=True)[: self.capacity]


def chains():
    """Chains over few blocks: a name is the path to it, as a chained hash is."""
    return st.lists(st.integers(0, 2), max_size=6).map(
        lambda steps: tuple(bytes(steps[: depth + 1]) for depth in range(len(steps)))
    )


@given(st.integers(1, 12), st.lists(chains(), max_size=40))
def test_hits_and_contents_are_those_of_a_sorted_list(capacity, prompts):
    cache, naive = PrefixLru(capacity), NaiveLru(capacity)
    for hashes in prompts:
        assert cache.num_hit_blocks(hashes) == naive.num_hit_blocks(hashes)
        cache.use(hashes)
        naive.use(hashes)
        assert len(cache) == len(naive.blocks) <= capacity


def test_the_last_token_is_never_a_hit():
    prompt = make_prompt(range(4 * BLOCK_SIZE), 1)
    assert ideal_hit_tokens([prompt, prompt], 100, BLOCK_SIZE) == 3 * BLOCK_SIZE
    longer = make_prompt(range(4 * BLOCK_SIZE + 1), 1)
    assert ideal_hit_tokens([prompt, longer], 100, BLOCK_SIZE) == 4 * BLOCK_SIZE


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
