"""Which blocks a sequence may take, and which the others will still want. Pure policy.

Too small a reserve for growth costs preemptions, too large a one costs batch size. So it follows the measured lengths
of answers: few reach `max_tokens`.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence

from shared.engine.sequence import EngineSequence, Goal
from shared.errors import Overloaded
from shared.kv.groups import KVGroups
from shared.kv.pool import BlockPool
from shared.sizing.step_fit import StepTimeFit
from shared.sizing.step_time import StepWork

WINDOW = 512
"""Finished answers that are remembered."""
MIN_OBSERVATIONS = 8
"""With fewer finished answers the first guess is used."""

SMALL_BATCH = 8
"""Sequences up to which a batch may be predicted from steps of one."""


class BatchLimit:
    """Bounds a decode batch so that its steps are predicted to take at most the target (see `most_step_s`)."""

    def __init__(self, target_s: float, fit: StepTimeFit) -> None:
        """`target_s`: seconds between two tokens of a sequence; 0 = no bound. `fit` learns from every step."""
        self.target_s = target_s
        self._fit = fit
        self._largest = 0  # that the fit knows of
        self._newer: tuple[int, int] = (0, 0)  # a larger one, and the number of its step

    def measured(self, work: StepWork) -> None:
        """A step has run; its time is in the fit."""
        if work.num_sequences > max(self._largest, self._newer[0]):
            self._newer = work.num_sequences, self._fit.num_steps

    def admits(self, num_seqs: int, num_context_tokens: int) -> bool:
        """Whether a batch may grow to this. A batch of one always may.

        Nothing is extrapolated far: a batch may be at most twice the largest one whose time is in the fit, or
        SMALL_BATCH, and of two while too little was measured.
        """
        if self.target_s == 0 or num_seqs <= 1:
            return True
        times = self._fit.times
        if times is None:
            return num_seqs == 2
        if self._fit.num_fitted >= self._newer[1]:
            self._largest = max(self._largest, self._newer[0])
        return num_seqs <= max(SMALL_BATCH, 2 * self._largest) and times.decode_step_s(
            num_seqs, num_context_tokens
        ) <= times.most_step_s(self.target_s, num_context_tokens / num_seqs)


class OutputLengths:
    """A quantile of the last WINDOW answers' lengths, given how long an answer is already."""

    def __init__(self, quantile: float, first_guess: int) -> None:
        """`quantile` in (0, 1]; `first_guess` in tokens, the expectation before MIN_OBSERVATIONS answers ended."""
        assert 0 < quantile <= 1, f"quantile {quantile} is not in (0, 1]"
        self._first_guess = first_guess
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []
        self._places = tuple(max(0, math.ceil(quantile * count) - 1) for count in range(WINDOW + 1))
        """Place of the quantile among `count` sorted lengths."""

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
        return self.expected_each((num_produced,))[0]

    def expected_each(self, produced: Sequence[int]) -> list[int]:
        """`expected` of each of these counts, for many answers at once."""
        lengths, places = self._sorted, self._places
        num_lengths = len(lengths)
        if num_lengths < MIN_OBSERVATIONS:
            guess = self._first_guess
            return [guess if count < guess else count + 1 for count in produced]
        return [
            2 * (count or 1) if shorter == num_lengths else lengths[shorter + places[num_lengths - shorter]]
            for count, shorter in [(count, bisect_right(lengths, count)) for count in produced]
        ]


class GrowthReserve:
    """Blocks kept free for sequences that hold some already."""

    def __init__(self, groups: KVGroups, quantile: float, first_guess: int) -> None:
        """See `OutputLengths`; quantile 0: one block of each KV group a sequence, however long its answer may be."""
        self._groups = groups
        self._lengths = OutputLengths(quantile, first_guess) if quantile > 0 else None

    def ended(self, sequence: EngineSequence) -> None:
        """Learns from an answer that ended or was cancelled."""
        if self._lengths is not None and sequence.goal is Goal.COMPLETION and sequence.num_output_tokens > 0:
            self._lengths.observe(sequence.num_output_tokens)

    def num_blocks(self, sequences: Sequence[EngineSequence]) -> int:
        """Blocks that these sequences are expected to take beyond those they hold."""
        if self._lengths is None:
            return len(sequences) * self._groups.size
        expected = self._expected_tokens(sequences)
        if not self._groups.is_plain:
            num_blocks = self._groups.num_blocks
            held = [(num_blocks(count), s.num_held_blocks) for s, count in zip(sequences, expected, strict=True)]
            return sum(max(0, most - num_held) for most, num_held in held)
        size = self._groups.block_size
        missing = [-(-count // size) - len(s.block_ids) for s, count in zip(sequences, expected, strict=True)]
        return sum([count for count in missing if count > 0])

    def of_newcomer(self, sequence: EngineSequence, num_held: int) -> int:
        """Blocks that a sequence is expected to take once it holds `num_held`."""
        if self._lengths is None:
            return 0
        return max(0, self._groups.num_blocks(self._expected_tokens((sequence,))[0]) - num_held)

    def _expected_tokens(self, sequences: Sequence[EngineSequence]) -> list[int]:
        """Of each, prompt and answer; of one that ends with its first token, what it has."""
        assert self._lengths is not None
        lengths = self._lengths.expected_each([len(s.token_ids) - s.num_prompt_tokens for s in sequences])
        return [
            len(s.token_ids)
            if s.ends_with_first_token
            else s.num_prompt_tokens + length
            if s.num_prompt_tokens + length < s.max_tokens_total
            else s.max_tokens_total
            for s, length in zip(sequences, lengths, strict=True)
        ]


class Admission:
    """`holders` are the sequences that hold blocks already, running or receiving."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, growth: GrowthReserve, batch_limit: BatchLimit) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._growth = growth
        self._batch_limit = batch_limit

    def ended(self, sequence: EngineSequence) -> None:
        """Learns from a sequence that held blocks and will want no more."""
        self._growth.ended(sequence)

    def growth(self, holders: Sequence[EngineSequence]) -> int:
        """Blocks that the holders are expected to take beyond those they hold."""
        return self._growth.num_blocks(holders)

    def check_batch(self, newcomer: EngineSequence, holders: Sequence[EngineSequence]) -> None:
        """Raises Overloaded where the batch has no place for the newcomer. Prompts whose answers run elsewhere take a
        place, and no time of later steps."""
        if len(holders) >= self._max_num_seqs:
            raise Overloaded(
                f"all {self._max_num_seqs} places of the batch are taken",
                field="max_num_seqs",
                limit=self._max_num_seqs,
            )
        if newcomer.goal is Goal.FIRST_TOKEN or self._batch_limit.target_s == 0:
            return
        answers = [s.num_tokens for s in holders if s.goal is Goal.COMPLETION]
        num_seqs = len(answers) + 1
        if not self._batch_limit.admits(num_seqs, newcomer.num_tokens + sum(answers)):
            target_ms = self._batch_limit.target_s * 1e3
            raise Overloaded(
                f"a step of {num_seqs} sequences is not known to take at most {target_ms:g} ms",
                field="tpot_target_ms",
                limit=target_ms,
            )

    def take_cached(
        self, newcomer: EngineSequence, cached: Sequence[int], num_blocks: int, holders: Sequence[EngineSequence]
    ) -> None:
        """Takes references on the cached blocks of a newcomer. Raises Overloaded where there is no room for the rest of
        its `num_blocks`, and then nothing is taken."""
        self._pool.acquire(cached)
        try:
            self._check_blocks(newcomer, num_blocks, num_blocks - len(cached), holders)
        except Overloaded:
            self._pool.release(cached)
            raise

    def _check_blocks(
        self, newcomer: EngineSequence, num_blocks: int, missing: int, holders: Sequence[EngineSequence]
    ) -> None:
        """Raises Overloaded where `missing` of the newcomer's `num_blocks` may not be taken: what all are expected to
        grow must find room too. One that would have the pool to itself is not held to that: it could never start.
        """
        later = self._growth.of_newcomer(newcomer, num_blocks) if holders else 0
        free = self._pool.num_free - (self.growth(holders) if holders else 0)
        if missing + later > free:
            free = max(0, free)
            raise Overloaded(
                f"needs {missing} more KV blocks and probably {later} later, {free} are free beside what running "
                f"requests will take",
                field="num_kv_blocks",
                limit=free,
            )
