"""One ideal cache's prefix hits, and why a fleet has fewer: split pools, placement, or timing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Served:
    """Where a prompt was computed, and how many of its tokens were cached."""

    prompt: Prompt
    prefill_worker: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Losses:
    """Hit tokens of the ideal cache that missed in the workers' own pools, by cause. Each may be negative, because
    several pools can hold blocks that one cache would have evicted. Their sum, less fetched tokens, is the shortfall.
    """

    split: int
    """No worker's pool held them any more: copies took space, or one pool got a larger share of the prompts."""
    placement: int
    """A worker held them, but another one computed the prompt."""
    timing: int
    """By the order of the prompts the worker should have held them, but an earlier prompt was still being computed, or
    running prompts took the space."""


def find_losses(
    served: Sequence[Served], num_ideal_tokens: int, num_fetched_tokens: int, pool_blocks: int, block_size: int
) -> Losses:
    """Replays the same prompts into pools of `pool_blocks`, one for each worker, in the order of sending.

    `num_ideal_tokens`: hits of the ideal cache; `num_fetched_tokens`: hits that were not in the worker's own pool.
    """
    pools = {worker: PrefixLru(pool_blocks) for worker in {item.prefill_worker for item in served}}
    num_best = num_chosen = num_found = 0
    for item in served:
        usable = item.prompt.usable(block_size)
        pool = pools[item.prefill_worker]
        num_best += max(each.num_hit_blocks(usable) for each in pools.values()) * block_size
        num_chosen += pool.num_hit_blocks(usable) * block_size
        num_found += item.num_cached_tokens
        pool.use(item.prompt.hashes)
    num_local = num_found - num_fetched_tokens
    return Losses(num_ideal_tokens - num_best, num_best - num_chosen, num_chosen - num_local)
