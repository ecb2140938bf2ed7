"""The ideal cache against one that keeps a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.bench.prefix.ideal import BLOCK_SIZE, PrefixLru, ideal_hit_tokens, make_prompt


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
    assert ideal_hit_tokens([prompt, prompt], 100) == 3 * BLOCK_SIZE
    longer = make_prompt(range(4 * BLOCK_SIZE + 1), 1)
    assert ideal_hit_tokens([prompt, longer], 100) == 4 * BLOCK_SIZE
