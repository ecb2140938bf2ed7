"""Blocks of sequences: which each holds, which it may take, and which the others will still want. Pure policy.

Too small a reserve for growth costs preemptions, too large a one costs batch size. So it follows the measured lengths
of answers: few reach `max_tokens`.

A copy to or from host memory belongs to the plan of the step before which it must be done, and copies run in the order
in which they were decided. So a freed block, or a freed slot, may be given away at once; the runner copies the bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence

from shared.engine.plan import BlockCopy
from shared.engine.sequence import EngineSequence, Goal
from shared.errors import Overloaded
from shared.kv.hashing import extend_chain
from shared.kv.pool import BlockPool, OutgoingBlock, OutOfBlocks
from shared.sizing.step_fit import StepTimeFit
from shared.sizing.step_time import StepWork

WINDOW = 512
"""Finished answers that are remembered."""
MIN_OBSERVATIONS = 8
"""With fewer finished answers the first guess is used."""


class BlockTables:
    """Operations on sequences' block tables; stateless."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def hashes(self, sequence: EngineSequence) -> list[bytes]:
        """Hashes of a sequence's full blocks."""
        extend_chain(sequence.block_hashes, sequence.hash_root, sequence.token_ids, self._pool.block_size)
        return sequence.block_hashes

    def take_found(self, sequence: EngineSequence) -> int:
        """Takes prompt blocks that others have sealed meanwhile, directly behind the computed ones; returns how many
        tokens they hold. 0 while a step that computes for the sequence is in flight."""
        block_size = self._pool.block_size
        start = len(sequence.block_ids)
        if sequence.num_in_flight_tokens or sequence.num_computed_tokens != start * block_size:
            return 0
        found = self._pool.match(self.hashes(sequence)[start : (sequence.num_prompt_tokens - 1) // block_size])
        self._pool.acquire(found)
        sequence.block_ids += found
        return len(found) * block_size

    def tokens_before_found(self, sequence: EngineSequence, max_tokens: int) -> int:
        """Tokens to compute before the first block of the prompt that lies in the pool already; at least 1, and all
        where none does. Looks no further than `max_tokens`."""
        block_size = self._pool.block_size
        start = sequence.num_planned_tokens
        end = min(start + max_tokens, sequence.num_prompt_tokens - 1)
        for index in range(start // block_size + 1, end // block_size):
            if self._pool.match([sequence.block_hashes[index]]):
                return index * block_size - start
        return sequence.num_tokens

    def grow(self, sequence: EngineSequence, count: int) -> bool:
        """Blocks for `count` more computed tokens; False where the pool has too few."""
        num_tokens = sequence.num_computed_tokens + sequence.num_in_flight_tokens + count
        missing = -(-num_tokens // self._pool.block_size) - len(sequence.block_ids)
        if missing <= 0:
            return True
        try:
            sequence.block_ids += self._pool.allocate(missing)
        except OutOfBlocks:
            return False
        return True

    def seal(self, sequence: EngineSequence, start: int) -> None:
        """Seals the full blocks from the one that holds token `start` on, those that are not yet."""
        block_size = self._pool.block_size
        first, end = start // block_size, sequence.num_computed_tokens // block_size
        if first == end:
            return  # as in most decode steps
        hashes = self.hashes(sequence)
        for index in range(first, end):
            if self._pool.hash_of(sequence.block_ids[index]) is None:
                self._pool.seal(sequence.block_ids[index], hashes[index])

    def ship(self, sequence: EngineSequence, end_block: int) -> list[OutgoingBlock]:
        """The blocks below `end_block` that are due; each holds a reference of its own for the sender."""
        if not sequence.ship_blocks:
            return []
        block_ids, checksum_of = sequence.block_ids, self._pool.checksum_of
        due = [
            OutgoingBlock(
                sequence.sequence_id, index, block_ids[index], checksum_of(block_ids[index]), sequence.receiver
            )
            for index in range(sequence.num_shipped_blocks, end_block)
            if index in sequence.ship_blocks
        ]
        sequence.num_shipped_blocks = max(sequence.num_shipped_blocks, end_block)
        self._pool.acquire([block.block_id for block in due])
        return due

    def free(self, sequence: EngineSequence) -> None:
        """Gives the sequence's references back."""
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.block_table = ()


class HostSwap:
    """Slots of one block each. A sequence is moved out whole or not at all: it is then recomputed."""

    def __init__(self, pool: BlockPool, num_slots: int) -> None:
        """`num_slots` 0: nothing is ever moved out."""
        self._pool = pool
        self._num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._copies: list[BlockCopy] = []

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return self._num_slots - len(self._free)

    @property
    def has_copies(self) -> bool:
        """True where copies wait for a step to take them."""
        return bool(self._copies)

    def move_out(self, sequence: EngineSequence) -> bool:
        """Plans copies of the blocks that a sequence has computed, which the caller then frees; False without room.

        No step in flight may write to them.
        """
        assert not sequence.host_slots, f"{sequence.sequence_id} lies in host memory already"
        num_blocks = -(-sequence.num_computed_tokens // self._pool.block_size)
        if num_blocks == 0 or num_blocks > len(self._free):
            return False
        sequence.host_slots = [self._free.pop() for _ in range(num_blocks)]
        sequence.num_host_tokens = sequence.num_computed_tokens
        pairs = zip(sequence.block_ids, sequence.host_slots, strict=False)  # it may hold blocks not written to yet
        self._copies += [BlockCopy(block_id, slot, to_host=True) for block_id, slot in pairs]
        return True

    def move_in(self, sequence: EngineSequence) -> int:
        """Brings a sequence's KV back behind the prefix that `block_ids` holds, into blocks that it allocates; the
        slots are free then. Returns how many of its tokens are computed.

        Raises OutOfBlocks where the pool has too few blocks.
        """
        held = len(sequence.block_ids)
        computed = max(held * self._pool.block_size, sequence.num_host_tokens)
        if len(sequence.host_slots) > held:
            sequence.block_ids += self._pool.allocate(len(sequence.host_slots) - held)
            pairs = zip(sequence.block_ids[held:], sequence.host_slots[held:], strict=True)
            self._copies += [BlockCopy(block_id, slot, to_host=False) for block_id, slot in pairs]
        self.drop(sequence)
        return computed

    def drop(self, sequence: EngineSequence) -> None:
        """Frees a sequence's slots, if it has any."""
        self._free += reversed(sequence.host_slots)
        sequence.host_slots = []
        sequence.num_host_tokens = 0

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies decided since the last call, for the step that is planned now."""
        copies, self._copies = tuple(self._copies), []
        return copies


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
        self, newcomer: EngineSequence, hashes: Sequence[bytes], num_blocks: int, holders: Sequence[EngineSequence]
    ) -> list[int]:
        """References on a newcomer's cached prefix. Raises Overloaded where there is no room for the rest of its
        `num_blocks`, and then nothing is taken."""
        cached = self._pool.match(hashes)
        self._pool.acquire(cached)
        try:
            self._check_blocks(newcomer, num_blocks, num_blocks - len(cached), holders)
        except Overloaded:
            self._pool.release(cached)
            raise
        return cached

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
