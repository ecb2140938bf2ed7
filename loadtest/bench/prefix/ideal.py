"""One cache for a whole trace: the hits of a fleet of the same capacity if its memory were one worker's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from loadtest.bench.prefix.prompts import Prompt


class PrefixLru:
    """Blocks by their chained hash, evicted least recently used first; within a prompt the last block first.

    So a block never outlives the one before it in its chain, and the rest of a prompt is always a prefix, as in
    `BlockPool`.
    """

    def __init__(self, capacity: int) -> None:
        """Holds `capacity` blocks."""
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    def num_hit_blocks(self, hashes: Sequence[bytes]) -> int:
        """Length of the chain's cached prefix, blocks. Changes nothing."""
        return next((i for i, name in enumerate(hashes) if name not in self._blocks), len(hashes))

    def use(self, hashes: Sequence[bytes]) -> None:
        """Records a served prompt: its blocks become the most recently used; blocks over the capacity are evicted."""
        for name in reversed(hashes):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def ideal_hit_tokens(prompts: Sequence[Prompt], capacity: int, block_size: int) -> int:
    """Prompt tokens that hit in one cache of `capacity` blocks, with the prompts served one after the other."""
    cache, num_hit_blocks = PrefixLru(capacity), 0
    for prompt in prompts:
        num_hit_blocks += cache.num_hit_blocks(prompt.usable(block_size))
        cache.use(prompt.hashes)
    return num_hit_blocks * block_size
