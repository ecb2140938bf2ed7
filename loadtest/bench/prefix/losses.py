"""Why a fleet has fewer hits than one cache: split pools, placement, or timing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.bench.prefix.ideal import PrefixLru
from loadtest.bench.prefix.prompts import Prompt


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
