"""Continuous batching with chunked prefill over the block pool. Pure policy: plain numbers in, a plan out.

Each step takes every running sequence that is down to its newest token first (decode), then chunks of prompts in
order of arrival, under one budget of tokens. Out of blocks, the youngest running sequence gives its blocks back and
waits; what of its prefix survives in the pool is found again when it returns.

A step may be planned while the one before still runs. Then every sequence is taken to go on: if it turns out to have
ended, what the later step computes for it is thrown away, and its blocks are given back only when no step in flight
writes to them any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from shared.engine.in_flight import StepsInFlight
from shared.engine.plan import (
    BlockToShip,
    BrokenSequence,
    NewToken,
    NoToken,
    PlannedSequence,
    StepOutcome,
    StepPlan,
    StepResult,
)
from shared.engine.sequence import Goal, Sequence, Status, StopCause
from shared.errors import Overloaded
from shared.kv.hashing import extend_chain
from shared.kv.pool import BlockPool, OutOfBlocks

_FINISH = {StopCause.STOP: "stop", StopCause.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine."""

    max_num_seqs: int = 64
    """Most sequences that hold blocks at once."""
    max_step_tokens: int = 512
    """Budget of tokens computed in one step; a longer prompt is computed in chunks."""


@dataclass(slots=True)
class SchedulerCounters:
    """Sums since start."""

    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0


class Scheduler:
    """Decides each step; owns the sequences and the pool. Not thread-safe: the engine thread alone calls it."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self.pool = pool
        self.config = config
        self.counters = SchedulerCounters()
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of arrival
        self._num_receiving = 0
        self._arrivals = 0
        self._started: list[tuple[str, int]] = []
        self._ended: list[tuple[bytes, ...]] = []
        self._in_flight = StepsInFlight()

    # --- sequences in and out

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence to be computed here; takes no blocks yet."""
        self._register(sequence)
        self._waiting.append(sequence)

    def reserve(self, sequence: Sequence) -> list[int]:
        """Takes blocks for a sequence whose KV will arrive: its cached prefix, and room for the rest of its tokens
        and one more. Returns the block indexes that must arrive. Raises Overloaded, and then nothing is taken.
        """
        if not self._can_start():
            raise Overloaded(
                f"all {self.config.max_num_seqs} places of the batch are taken",
                field="max_num_seqs",
                limit=self.config.max_num_seqs,
            )
        block_size = self.pool.block_size
        hashes = self._hash(sequence)
        cached = self.pool.match(hashes)
        num_blocks = -(-(sequence.num_tokens + 1) // block_size)
        self.pool.acquire(cached)
        try:
            fresh = self.pool.allocate(num_blocks - len(cached))
        except OutOfBlocks as error:
            self.pool.release(cached)
            raise Overloaded(
                f"needs {error.needed} more KV blocks, {error.free} are free",
                field="num_kv_blocks",
                limit=error.free,
            ) from None
        self._register(sequence)
        self._num_receiving += 1
        sequence.status = Status.RECEIVING
        sequence.block_ids = cached + fresh
        self._count_prefix(sequence, len(cached) * block_size)
        sequence.started = True
        return list(range(len(cached), -(-sequence.num_tokens // block_size)))

    def join(self, sequence_id: str, first_token: int, checksums: dict[int, int], first_bad_block: int | None) -> None:
        """A reserved sequence's blocks have arrived: it runs from the next step on, or is done if `first_token`
        ended it. Blocks from `first_bad_block` on are not trusted: their tokens are computed again here.
        """
        sequence = self._sequences[sequence_id]
        assert sequence.status is Status.RECEIVING
        block_size = self.pool.block_size
        computed = sequence.num_tokens
        if first_bad_block is not None:
            computed = first_bad_block * block_size
        sequence.num_computed_tokens = computed
        sequence.num_arrived_blocks = computed // block_size
        sequence.num_cached_tokens = min(sequence.num_cached_tokens, computed)
        for index in range(computed // block_size):
            block_id = sequence.block_ids[index]
            self._seal(sequence, index)
            if index in checksums and self.pool.hash_of(block_id) is not None:
                self.pool.set_checksum(block_id, checksums[index])
        sequence.token_ids.append(first_token)
        sequence.check()
        self._num_receiving -= 1
        if sequence.stop_cause() is not None:
            self._retire(sequence)
        else:
            sequence.status = Status.RUNNING
            self._insert_running(sequence)

    def abort(self, sequence_id: str) -> bool:
        """Forgets a sequence and gives its blocks back; False where it is unknown (already done)."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        else:
            self._num_receiving -= 1
        self._retire(sequence)
        return True

    # --- steps

    @property
    def has_work(self) -> bool:
        """True where `schedule` may return a plan."""
        return bool(self._running or self._waiting)

    def schedule(self) -> StepPlan:
        """The next step, in flight until `apply`. Changes the pool (allocates, preempts), starts waiting sequences.

        Empty where there is nothing to compute, or where the result of the step in flight decides what comes next.
        At most one step may be in flight.
        """
        budget = self.config.max_step_tokens
        planned: dict[str, PlannedSequence] = {}
        ready = [s for s in self._running if not s.ends_in_flight]
        if any(s.num_in_flight_samples and s.sampling.has_penalties for s in ready):
            return StepPlan(())  # how a penalised sequence goes on depends on the very token that is not known yet
        decodes = [s for s in ready if s.num_unplanned_tokens == 1]
        chunks = [s for s in ready if s.num_unplanned_tokens > 1]
        for sequence in (*decodes, *chunks):
            if budget == 0:
                break
            if sequence.status is not Status.RUNNING:  # preempted by an earlier one of this step
                continue
            self._skip_cached(sequence)
            count = min(budget, sequence.num_unplanned_tokens, self._tokens_before_cached(sequence))
            if self._in_flight and not self._grow(sequence, count):
                return StepPlan(())  # nobody can be preempted before the step in flight is done
            if self._make_room(sequence, count, planned):
                planned[sequence.sequence_id] = self._in_flight.share(sequence, count)
                budget -= count
        while budget > 0 and self._waiting and self._can_start():
            sequence = self._waiting[0]
            if not self._start(sequence):
                break
            self._waiting.popleft()
            self._insert_running(sequence)
            count = min(budget, sequence.num_uncomputed_tokens, self._tokens_before_cached(sequence))
            if not self._grow(sequence, count):
                self._preempt(sequence)
                break
            planned[sequence.sequence_id] = self._in_flight.share(sequence, count)
            budget -= count
        return self._in_flight.take_off(list(planned.values()), [self._sequences[name] for name in planned])

    def apply(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Takes the result of the oldest step in flight: lengths move on, full blocks are sealed, ended sequences
        leave. A sequence that no token could be chosen for leaves too, and its blocks are found no more: the cause may
        lie in any of them.
        """
        if not plan.sequences:
            return StepOutcome((), ())
        sequences = self._in_flight.land(plan)
        tokens: list[NewToken] = []
        ships: list[BlockToShip] = []
        broken: list[BrokenSequence] = []
        sampled = iter(result.sampled)
        for item, sequence in zip(plan.sequences, sequences, strict=True):
            token = next(sampled) if item.sample is not None else None
            if sequence.status is Status.FINISHED:  # ended or aborted while the step ran
                self._free_if_landed(sequence)
                continue
            if isinstance(token, NoToken):
                broken.append(BrokenSequence(item.sequence_id, sequence.num_tokens, token.source))
                self._running.remove(sequence)
                self.pool.forget(sequence.block_ids)
                self._retire(sequence)
                continue
            sequence.num_computed_tokens = item.end
            self._seal_full_blocks(sequence, item.start)
            if token is None:
                ships += self._ship(sequence, item.end // self.pool.block_size)
                sequence.check()
                continue
            if sequence.goal is Goal.FIRST_TOKEN:
                ships += self._ship(sequence, -(-item.end // self.pool.block_size))
            sequence.token_ids.append(token.token_id)
            sequence.check()
            cause = sequence.stop_cause()
            tokens.append(NewToken(item.sequence_id, token, _FINISH[cause] if cause else None))
            if cause is not None or sequence.goal is Goal.FIRST_TOKEN:
                self._running.remove(sequence)
                self._retire(sequence)
        return StepOutcome(tuple(tokens), tuple(ships), tuple(broken))

    def take_started(self) -> list[tuple[str, int]]:
        """(sequence id, cached tokens) of those that since the last call got their first turn, or found more."""
        started, self._started = self._started, []
        return started

    def take_ended(self) -> list[tuple[bytes, ...]]:
        """Hashes of the sealed blocks of those that left since the last call, save what a hand-off brought."""
        ended, self._ended = self._ended, []
        return ended

    # --- what others may know

    def sequence(self, sequence_id: str) -> Sequence | None:
        """The live sequence of that id; callers read it only."""
        return self._sequences.get(sequence_id)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks, those still receiving included."""
        return len(self._running) + self._num_receiving

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be computed."""
        return len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens not computed yet, over all sequences."""
        return sum(s.num_uncomputed_tokens for s in self._waiting) + sum(
            s.num_uncomputed_tokens for s in self._running if s.num_uncomputed_tokens > 1
        )

    def check_integrity(self) -> None:
        """Asserts that sequences and pool agree; called by tests and by idle workers."""
        self.pool.check_integrity()
        for sequence in self._sequences.values():
            sequence.check()
            held = sequence.status in (Status.RUNNING, Status.RECEIVING)
            assert held or not sequence.block_ids, f"{sequence.sequence_id} waits but holds blocks"
            if held:
                capacity = len(sequence.block_ids) * self.pool.block_size
                assert sequence.num_computed_tokens <= capacity, f"{sequence.sequence_id}: computed beyond its blocks"
        assert [s.arrival for s in self._running] == sorted(s.arrival for s in self._running)
        assert len(self._sequences) == self.num_running + self.num_waiting

    # --- inside

    def _register(self, sequence: Sequence) -> None:
        assert sequence.sequence_id not in self._sequences, f"{sequence.sequence_id} is known already"
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._sequences[sequence.sequence_id] = sequence

    def _insert_running(self, sequence: Sequence) -> None:
        """Keeps `_running` in order of arrival: blocks do not arrive in the order of their reservation."""
        index = len(self._running)
        while index > 0 and self._running[index - 1].arrival > sequence.arrival:
            index -= 1
        self._running.insert(index, sequence)

    def _can_start(self) -> bool:
        return self.num_running < self.config.max_num_seqs

    def _hash(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the blocks whose KV may be reused; the last token is always computed, to have its logits."""
        extend_chain(sequence.block_hashes, sequence.hash_root, sequence.token_ids, self.pool.block_size)
        return sequence.block_hashes

    def _start(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence its cached prefix; False where too few blocks are free for all of its tokens."""
        block_size = self.pool.block_size
        usable = (sequence.num_tokens - 1) // block_size
        cached = self.pool.match(self._hash(sequence)[:usable])
        num_blocks = -(-sequence.num_tokens // block_size)
        self.pool.acquire(cached)
        # One block a running sequence stays free, or the newcomer would be preempted by their next growth.
        if num_blocks - len(cached) + self.num_running > self.pool.num_free:
            self.pool.release(cached)
            return False
        sequence.block_ids = cached
        sequence.status = Status.RUNNING
        sequence.num_computed_tokens = len(cached) * block_size
        if not sequence.started:
            self._count_prefix(sequence, len(cached) * block_size)
            sequence.started = True
            self._started.append((sequence.sequence_id, sequence.num_cached_tokens))
        return True

    def _skip_cached(self, sequence: Sequence) -> None:
        """Blocks of the prompt that came into the pool since the sequence started, fetched or computed for another one,
        need not be computed: it goes on behind them."""
        block_size = self.pool.block_size
        start = len(sequence.block_ids)
        if sequence.num_in_flight_tokens or sequence.num_computed_tokens != start * block_size:
            return
        found = self.pool.match(sequence.block_hashes[start : (sequence.num_prompt_tokens - 1) // block_size])
        if found:
            self.pool.acquire(found)
            sequence.block_ids = sequence.block_ids + found
            num_tokens = len(found) * block_size
            sequence.num_computed_tokens += num_tokens
            sequence.num_cached_tokens += num_tokens
            self.counters.num_prefix_hit_tokens += num_tokens
            self._started.append((sequence.sequence_id, sequence.num_cached_tokens))

    def _tokens_before_cached(self, sequence: Sequence) -> int:
        """Tokens to compute before the first block of the prompt that lies in the pool already, or all; at least 1."""
        block_size = self.pool.block_size
        start = sequence.num_planned_tokens
        end = min(start + self.config.max_step_tokens, sequence.num_prompt_tokens - 1)
        for index in range(start // block_size + 1, end // block_size):
            if self.pool.match([sequence.block_hashes[index]]):
                return index * block_size - start
        return sequence.num_tokens

    def _count_prefix(self, sequence: Sequence, num_cached_tokens: int) -> None:
        num_cached_tokens = min(num_cached_tokens, sequence.num_prompt_tokens)
        sequence.num_cached_tokens = num_cached_tokens
        if sequence.status is Status.RECEIVING:
            sequence.num_computed_tokens = num_cached_tokens
        self.counters.num_prompt_tokens += sequence.num_prompt_tokens
        self.counters.num_prefix_hit_tokens += num_cached_tokens

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more computed tokens; False where the pool has too few."""
        missing = -(-(sequence.num_planned_tokens + count) // self.pool.block_size) - len(sequence.block_ids)
        if missing <= 0:
            return True
        try:
            sequence.block_ids += self.pool.allocate(missing)
        except OutOfBlocks:
            return False
        return True

    def _make_room(self, sequence: Sequence, count: int, planned: dict[str, PlannedSequence]) -> bool:
        """Grows a running sequence, preempting younger ones as needed; False where it had to go itself."""
        while not self._grow(sequence, count):
            victim = next((s for s in reversed(self._running) if s.sequence_id not in planned), sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.num_in_flight_tokens == 0, f"{sequence.sequence_id} is in flight"
        self._running.remove(sequence)
        self._free_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_cached_tokens = 0
        sequence.status = Status.WAITING
        self._waiting.appendleft(sequence)
        self.counters.num_preemptions += 1

    def _seal_full_blocks(self, sequence: Sequence, start: int) -> None:
        block_size = self.pool.block_size
        self._hash(sequence)
        for index in range(start // block_size, sequence.num_computed_tokens // block_size):
            self._seal(sequence, index)

    def _seal(self, sequence: Sequence, index: int) -> None:
        block_id = sequence.block_ids[index]
        if self.pool.hash_of(block_id) is None:
            self.pool.seal(block_id, sequence.block_hashes[index])

    def _ship(self, sequence: Sequence, end_block: int) -> list[BlockToShip]:
        """The blocks below `end_block` that are due; each carries a reference of its own for the shipper."""
        if not sequence.ship_blocks:
            return []
        due = [
            BlockToShip(sequence.sequence_id, index, sequence.block_ids[index])
            for index in range(sequence.num_shipped_blocks, end_block)
            if index in sequence.ship_blocks
        ]
        sequence.num_shipped_blocks = max(sequence.num_shipped_blocks, end_block)
        self.pool.acquire([ship.block_id for ship in due])
        return due

    def release(self, block_ids: Seq[int]) -> None:
        """Gives back the shipper's references."""
        self.pool.release(block_ids)

    def _free_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []

    def _retire(self, sequence: Sequence) -> None:
        sequence.status = Status.FINISHED
        computed = sequence.num_computed_tokens // self.pool.block_size
        if computed > sequence.num_arrived_blocks:
            self._ended.append(tuple(sequence.block_hashes[sequence.num_arrived_blocks : computed]))
        del self._sequences[sequence.sequence_id]
        self._free_if_landed(sequence)

    def _free_if_landed(self, sequence: Sequence) -> None:
        """Gives back a finished sequence's blocks once no step in flight writes to them: a receive might, next."""
        if sequence.num_in_flight_tokens == 0:
            self._free_blocks(sequence)
