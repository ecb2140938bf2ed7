"""How long answers become, and how many blocks the running ones will still take. Pure policy: plain numbers.

Too small a reserve costs preemptions, too large a one costs batch size. So it follows the measured lengths of answers:
few reach `max_tokens`.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from shared.engine.sequence import EngineSequence, Goal

WINDOW = 512
"""Finished answers that are remembered."""
MIN_OBSERVATIONS = 8
"""With fewer finished answers the first guess is used."""


class OutputLengths:
    """A quantile of the last WINDOW answers' lengths, given how long an answer is already."""

    def __init__(self, quantile: float, first_guess: int) -> None:
        """`quantile` in (0, 1]; `first_guess` in tokens, the expectation before MIN_OBSERVATIONS answers ended."""
        assert 0 < quantile <= 1, f"quantile {quantile} is not in (0, 1]"
        self._quantile = quantile
        self._first_guess = first_guess
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, num_tokens: int) -> None:
        """An answer ended."""
        if len(self._newest) == WINDOW:
            oldest = self._newest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._newest.append(num_tokens)
        insort(self._sorted, num_tokens)

    def expected(self, num_produced: int) -> int:
        """Expected length of an unfinished answer that has `num_produced` tokens: always more than that.

        The quantile of those answers that became longer. One that is longer than all of them is expected to be half
        done: nothing else is known of it.
        """
        if len(self._sorted) < MIN_OBSERVATIONS:
            return max(self._first_guess, num_produced + 1)
        shorter = bisect_right(self._sorted, num_produced)
        longer = len(self._sorted) - shorter
        if longer == 0:
            return 2 * max(1, num_produced)
        return self._sorted[shorter + max(0, math.ceil(self._quantile * longer) - 1)]


class GrowthReserve:
    """Blocks kept free for sequences that hold some already."""

    def __init__(self, block_size: int, quantile: float, first_guess: int) -> None:
        """See `OutputLengths`; quantile 0: one block a sequence, however long its answer may be."""
        self._block_size = block_size
        self._lengths = OutputLengths(quantile, first_guess) if quantile > 0 else None

    def ended(self, sequence: EngineSequence) -> None:
        """Learns from an answer that ended or was cancelled."""
        if self._lengths is not None and sequence.goal is Goal.COMPLETION and sequence.num_output_tokens > 0:
            self._lengths.observe(sequence.num_output_tokens)

    def num_blocks(self, sequences: Iterable[EngineSequence]) -> int:
        """Blocks that these sequences are expected to take beyond those they hold."""
        if self._lengths is None:
            return sum(1 for _ in sequences)
        total = 0
        for sequence in sequences:
            missing = -(-self._expected_tokens(sequence) // self._block_size) - len(sequence.block_ids)
            if missing > 0:
                total += missing
        return total

    def of_newcomer(self, sequence: EngineSequence, num_held: int) -> int:
        """Blocks that a sequence is expected to take once it holds `num_held`."""
        if self._lengths is None:
            return 0
        return max(0, -(-self._expected_tokens(sequence) // self._block_size) - num_held)

    def _expected_tokens(self, sequence: EngineSequence) -> int:
        num_tokens = len(sequence.token_ids)
        if sequence.goal is Goal.FIRST_TOKEN:
            return num_tokens
        assert self._lengths is not None
        num_prompt_tokens = sequence.num_prompt_tokens
        expected = num_prompt_tokens + self._lengths.expected(num_tokens - num_prompt_tokens)  # more than num_tokens
        return min(sequence.max_tokens_total, expected)
