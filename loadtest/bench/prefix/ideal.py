"""A trace's prompts as blocks, and how many of them one ideal cache has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from loadtest.workloads.tokens import TokenSource
from loadtest.workloads.trace import BLOCK_LEN, Replay
from loadtest.workloads.trace_json import read_json_trace
from shared.kv.hashing import chain, root_hash
from shared.kv.layout import LAYOUT_VERSION

BLOCK_SIZE = 16
"""Tokens of a worker's KV block, and of a trace's block at the replayed scale."""
SCALE = BLOCK_LEN // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    token_ids: Sequence[int]
    num_output_tokens: int
    hashes: Sequence[bytes]
    """Hashes of its full blocks; equal if the blocks and all blocks before them are. Not a worker's real chain."""

    @property
    def usable(self) -> Sequence[bytes]:
        """The blocks that can be hits: the last token is always computed, because it yields the next one."""
        return self.hashes[: (len(self.token_ids) - 1) // BLOCK_SIZE]


def make_prompt(token_ids: Sequence[int], num_output_tokens: int) -> Prompt:
    """Hashes the full blocks."""
    root = root_hash("ideal", "float32", LAYOUT_VERSION)
    return Prompt(token_ids, num_output_tokens, tuple(chain(root, token_ids, BLOCK_SIZE)))


def read_prompts(path: Path, num_requests: int, scale_output: int, source: TokenSource) -> list[Prompt]:
    """The first requests of a Mooncake trace in its order; each of its blocks of 512 tokens becomes one of 16 here.

    Raises ConfigError for a file that cannot be read, and for tokens that cannot distinguish the blocks.
    """
    source.check_block(BLOCK_SIZE)
    replay = Replay(list(islice(read_json_trace(path), num_requests)), BLOCK_LEN, SCALE, scale_output)
    turns = (conversation.turns[0] for conversation in replay.conversations(np.random.default_rng(0)))
    return [make_prompt(source.prompt(turn.spans), turn.num_output_tokens) for turn in turns]


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


def ideal_hit_tokens(prompts: Sequence[Prompt], capacity: int) -> int:
    """Prompt tokens that hit in one cache of `capacity` blocks, with the prompts served one after the other."""
    cache, num_hit_blocks = PrefixLru(capacity), 0
    for prompt in prompts:
        num_hit_blocks += cache.num_hit_blocks(prompt.usable)
        cache.use(prompt.hashes)
    return num_hit_blocks * BLOCK_SIZE
