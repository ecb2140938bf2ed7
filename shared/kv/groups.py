"""KV groups: layers that keep the same tokens share one block table. Policy only: no tensors.

Blocks of all groups have the same number of bytes and come from one pool: they are allocated, hashed, sent and stored
alike. A sequence's blocks are one list, the groups of its first `block_size` tokens, then those of the next ones: block
b of group g is at place `b * size + g`. Of a group with a window a sequence holds the blocks that its next token sees;
what lies behind them is given back, and is NO_BLOCK in its list.

A block of a group of states holds no tokens but what some layers keep of all tokens up to its last one, or up to the
newest one. What the next token needs is the block in which the token before it lies: so states are kept, handed over
and looked up like a window of two tokens. A step writes the last two of its blocks alone: see `written_states`. Behind
guesses it writes a state each, to blocks that are in no list: those of the right ones then take their places there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

MAX_GROUPS = 16
"""More would cost a step more than blocks behind windows are worth: such a model keeps all layers in one group."""
MAX_PADDING = 8
"""At most one in this number of the layers for which all groups together have room is left empty."""
STATE_WINDOW = 2
"""Window of a group of states."""
UNBOUNDED = 1 << 62
"""Tokens of a sequence of any length."""
NO_BLOCK = -1
"""In place of a block's id: the sequence holds none there, and needs none."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """What each group of a model keeps, the same for every worker of a cluster."""

    block_size: int
    """Tokens a block."""
    windows: tuple[int | None, ...] = (None,)
    """For each group the tokens that its layers see, None for all."""
    num_states: int = 0
    """How many of the groups hold states: these are the last ones, and never all."""

    @property
    def size(self) -> int:
        """Number of groups, and of blocks that `block_size` new tokens take."""
        return len(self.windows)

    @property
    def is_plain(self) -> bool:
        """One group that keeps everything: a block's place is its number."""
        return self.windows == (None,)

    @property
    def windowed(self) -> tuple[tuple[int, int], ...]:
        """(group, window) of those that do not keep everything."""
        return tuple((group, window) for group, window in enumerate(self.windows) if window is not None)

    @property
    def full(self) -> tuple[int, ...]:
        """The groups that keep everything."""
        return tuple(group for group, window in enumerate(self.windows) if window is None)

    def first_seen(self, window: int, num_tokens: int) -> int:
        """The first block that the token behind the first `num_tokens` sees, or one behind it."""
        return max(0, num_tokens - window + 1) // self.block_size

    def num_blocks(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Blocks that a sequence of `num_tokens` tokens holds at most, computed `step_tokens` at once."""
        every, held = -(-num_tokens // self.block_size), 0
        if self.is_plain:
            return every
        for window, is_state, count in _kinds(self.windows, self.num_states):
            most = every
            if window is not None:
                most = min(every, -(-(window - 1 + step_tokens) // self.block_size) + 1)
            if is_state:
                most = min(most, 3)  # what a step reads, and two that it writes
            held += count * most
        return held

    def is_state(self, group: int) -> bool:
        """Whether a group's blocks hold states."""
        return group >= self.size - self.num_states

    def written_states(self, start: int, end: int) -> tuple[int, ...]:
        """Blocks into which the tokens `start` … `end` - 1, computed at once, write states, rising: the last that they
        fill, for others that continue behind it, and the one of the newest token, for the next step."""
        last_full, last = end // self.block_size - 1, (end - 1) // self.block_size
        return (last,) if last_full == last or last_full < start // self.block_size else (last_full, last)

    def state_places(self, start: int, end: int) -> tuple[int, int, int]:
        """Blocks of states that the tokens `start` … `end` - 1, computed at once, read and write, NO_BLOCK for none:
        that of the token before them, and of `written_states` the one that they fill before their end, and the last."""
        *filled, last = self.written_states(start, end)
        return (start - 1) // self.block_size if start else NO_BLOCK, filled[0] if filled else NO_BLOCK, last

    def state_blocks(self, block_ids: Sequence[int], start: int, end: int) -> list[Sequence[int]]:
        """The blocks of the groups of states that a sequence has at each of `state_places`: three times `num_states`
        ids, NO_BLOCK where there is none."""
        nothing, found = (NO_BLOCK,) * self.num_states, list[Sequence[int]]()
        for place in self.state_places(start, end):
            behind = (place + 1) * self.size
            found.append(nothing if place == NO_BLOCK else block_ids[behind - self.num_states : behind])
        return found

    def guess_state_blocks(
        self, block_ids: Sequence[int], start: int, guess_states: Sequence[int]
    ) -> list[list[Sequence[int]]]:
        """As `state_blocks`, for each token of a step by itself that computes the one at `start` and guesses behind it:
        each reads what the one before it wrote. `guess_states`: `num_states` blocks for each guess."""
        nothing = (NO_BLOCK,) * self.num_states
        before, _, own = self.state_blocks(block_ids, start, start + 1)
        found = [[before, nothing, own]]
        for first in range(0, len(guess_states), self.num_states):
            states = guess_states[first : first + self.num_states]
            found.append([found[-1][2], nothing, states])
        return found

    def num_missing(self, num_tokens: int, num_cached: int, step_tokens: int = 1) -> int:
        """Number of `num_blocks` that are not at hand where the blocks from which to continue behind the first
        `num_cached` tokens are."""
        if self.is_plain:
            return max(0, -(-num_tokens // self.block_size) - num_cached // self.block_size)
        held, at_hand = num_cached // self.block_size, 0
        for window, _, count in _kinds(self.windows, self.num_states):
            first = 0 if window is None else self.first_seen(window, num_tokens)
            at_hand += count * max(0, held - first)
        return max(0, self.num_blocks(num_tokens, step_tokens) - at_hand)

    def num_tokens(self, num_blocks: int, length: float) -> float:
        """Tokens of sequences of `length` tokens each that `num_blocks` blocks hold."""
        if self.is_plain:
            return num_blocks * self.block_size
        length = max(1.0, length)
        return num_blocks * length / self.num_blocks(math.ceil(length))

    def max_tokens(self, num_blocks: int, step_tokens: int = 1) -> int:
        """Tokens of the longest sequence of whole blocks that `num_blocks` blocks hold: UNBOUNDED where no group keeps
        everything and they hold the windows."""
        if self.is_plain:
            return num_blocks * self.block_size
        if not self.full and self.num_blocks(UNBOUNDED, step_tokens) <= num_blocks:
            return UNBOUNDED
        low, high = 0, num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_blocks(middle * self.block_size, step_tokens) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    def longest(self, has: Callable[[int], bool], end: int, start: int = 0) -> int:
        """The longest prefix, in blocks, at which every group can continue: `start` < it <= `end`, else `start`.

        `has` says whether the block at a place is at hand; all that the token behind `start` blocks sees is.
        """
        size, windowed = self.size, self.windowed
        runs = [start] * size  # blocks at hand, without a hole, up to the one that is looked at
        found = start
        for block in range(start, end):
            for group, window in enumerate(self.windows):
                if has(block * size + group):
                    runs[group] += 1
                elif window is None:
                    return found
                else:
                    runs[group] = 0
            num_tokens = (block + 1) * self.block_size
            if all(runs[group] > block - self.first_seen(window, num_tokens) for group, window in windowed):
                found = block + 1
        return found

    def seen_behind(self, num_blocks: int, start: int = 0) -> list[int]:
        """Places from block `start` on of what the token behind `num_blocks` blocks sees, rising."""
        return [place for place in self.seen_by_next(num_blocks * self.block_size) if place >= start * self.size]

    def seen_by_next(self, num_tokens: int) -> list[int]:
        """Places of what the token behind the first `num_tokens` sees, rising; the last block may be partly filled."""
        firsts = [0 if window is None else self.first_seen(window, num_tokens) for window in self.windows]
        num_blocks, size = -(-num_tokens // self.block_size), self.size
        return [block * size + group for block in range(num_blocks) for group in range(size) if block >= firsts[group]]


@lru_cache(maxsize=64)
def _kinds(windows: tuple[int | None, ...], num_states: int) -> tuple[tuple[int | None, bool, int], ...]:
    """(window, whether it is of states, number of groups) of the groups that are alike."""
    num_others = len(windows) - num_states
    found = Counter((window, group >= num_others) for group, window in enumerate(windows))
    return tuple((window, is_state, count) for (window, is_state), count in found.items())


def group_layers(windows: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    """Layers by group, given each layer's window: as few groups as MAX_PADDING allows, each of layers with one window.
    All layers are in one, whatever their windows, where that makes too many groups.

    Groups that keep everything come first, the others in the order of their layers.
    """
    found = sorted(set(windows), key=lambda window: (window is not None, windows.index(window)))
    kinds: dict[int | None, list[int]] = {window: [] for window in found}
    for layer, window in enumerate(windows):
        kinds[window].append(layer)
    for width in range(min(map(len, kinds.values())), 0, -1):
        groups = [
            tuple(layers[begin : begin + width]) for layers in kinds.values() for begin in range(0, len(layers), width)
        ]
        if (len(groups) * width - len(windows)) * MAX_PADDING <= len(groups) * width:
            break
    return tuple(groups) if len(groups) <= MAX_GROUPS else (tuple(range(len(windows))),)
