"""How a sequence starts, loses its blocks, and leaves: moves between the states of `SequenceTable` with all that
goes with them (blocks, host memory, beams, counters). Pure policy, part of the scheduler.

A preempted sequence's blocks are copied to host memory while that has room, and only those come back that did not
survive in the pool; without room the sequence is computed again.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.messages import SequenceEnded, SequenceFailed
from shared.engine.scheduler.beams import BeamSearches
from shared.engine.scheduler.block_admission import Admission, BatchLimit, GrowthReserve
from shared.engine.scheduler.block_tables import block_tables, held_of
from shared.engine.scheduler.config import SchedulerConfig, SchedulerCounters
from shared.engine.scheduler.host_swap import HostSwap
from shared.engine.scheduler.pacing import Pacing
from shared.engine.scheduler.sequence_table import SequenceTable
from shared.engine.sequence import EngineSequence, Status
from shared.engine.speculation.speculator import Speculator
from shared.errors import Overloaded, TandemError
from shared.kv.groups import KVGroups
from shared.kv.pool import BlockPool
from shared.sizing.step_fit import StepTimeFit

TRY_AGAIN = 16
"""Plans until a sequence that found no room is tried again where there is no more room than then: others may have
computed some of its prefix. A try looks for all blocks of its prompt."""


class Lifecycle:
    """The parts of a scheduler that hold sequences and their blocks, and the moves that concern several of them.

    Not thread-safe, as the scheduler.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        clock: Callable[[], float],
        step_fit: StepTimeFit | None,
        groups: KVGroups | None,
        speculator: Speculator | None,
    ) -> None:
        """The arguments are the scheduler's."""
        self.pool = pool
        self.config = config
        self.groups = groups or KVGroups(pool.block_size)
        self.counters = SchedulerCounters()
        self.sequences = SequenceTable()
        self.tables = block_tables(pool, self.groups, config.max_num_batched_tokens)
        self.swap = HostSwap(pool, config.num_host_blocks, self.groups.size)
        self.beams = BeamSearches(
            pool, self.sequences, self.tables, self.swap, config.max_num_seqs, clock, is_plain=self.groups.is_plain
        )
        self.step_fit = step_fit or StepTimeFit()
        self.batch_limit = BatchLimit(config.tpot_target_s, self.step_fit)
        growth = GrowthReserve(self.groups, config.output_quantile, config.first_output_guess)
        self.admission = Admission(pool, config.max_num_seqs, growth, self.batch_limit)
        self.pacing = Pacing(config.tpot_target_s, config.itl_target_s, self.step_fit)
        self.speculator = speculator
        self.clock = clock
        self.started: list[tuple[str, int]] = []
        """(sequence id, cached tokens) of those that got their first turn, or found more in the pool."""
        self.ended: list[SequenceEnded] = []
        """Sequences that left with more sealed blocks than a hand-off brought."""
        self.failed: list[SequenceFailed] = []
        self._refused = ""  # the sequence that found no room at its last try, …
        self._refused_room = 0  # … `_room` then: the blocks that are free beside what holders will take, …
        self._num_passed = 0  # … and plans since

    def start(self, sequence: EngineSequence) -> bool:
        """Gives a waiting sequence its cached prefix, and what host memory holds of it; False where it cannot start
        yet. Blocks for the rest of its tokens are free then."""
        holders = self.sequences.holders
        try:
            self.admission.check_batch(sequence, holders)
        except Overloaded:
            return False
        if sequence.sequence_id == self._refused and self._is_in_vain():
            return False
        while True:
            # The last token is always computed, to have its logits.
            cached = self.tables.cached(sequence, sequence.num_tokens - 1)
            try:
                self.admission.take_cached(sequence, held_of(cached), self.tables.num_needed(sequence), holders)
                break
            except Overloaded:
                if not self.beams.give_back():
                    self._refused, self._refused_room, self._num_passed = sequence.sequence_id, self._room, 0
                    return False
        self.sequences.run(sequence)
        sequence.num_found_tokens = 0
        if sequence.preempted_at:
            sequence.preempted_s += self.clock() - sequence.preempted_at
            sequence.preempted_at = 0.0
        sequence.block_ids = cached
        num_cached = len(cached) // self.groups.size * self.pool.block_size
        self.counters.num_swapped_in += bool(sequence.host_slots)
        sequence.num_computed_tokens = self.swap.move_in(sequence)
        self.tables.give_back_unseen(sequence)
        self.tables.seal(sequence, num_cached)
        if not sequence.started:
            self.count_prefix(sequence, num_cached)
            sequence.started = True
            self.started.append((sequence.sequence_id, sequence.num_cached_tokens))
        elif not self.config.recomputes and sequence.num_unplanned_tokens > 1:
            self.fail(sequence, _lost_blocks())
            return False
        return True

    @property
    def _room(self) -> int:
        return self.pool.num_free - self.admission.growth(self.sequences.holders)

    def _is_in_vain(self) -> bool:
        """Whether another try of the refused sequence would be refused too, as far as is known. False where no step
        follows after which that could be looked at again."""
        if not self.sequences.running or self._room > self._refused_room:
            return False
        self._num_passed += 1
        return self._num_passed < TRY_AGAIN

    def skip_cached(self, sequence: EngineSequence) -> None:
        """Blocks of the prompt that came into the pool since the sequence started, fetched or computed for another
        one, need not be computed: it continues behind them."""
        num_tokens = self.tables.take_found(sequence)
        if num_tokens:
            sequence.num_computed_tokens += num_tokens
            sequence.num_cached_tokens += num_tokens
            self.counters.num_prefix_hit_tokens += num_tokens
            self.started.append((sequence.sequence_id, sequence.num_cached_tokens))

    def count_prefix(self, sequence: EngineSequence, num_cached_tokens: int) -> None:
        """Notes once for each sequence how much of its prompt it found in the pool."""
        num_cached_tokens = min(num_cached_tokens, sequence.num_prompt_tokens)
        sequence.num_cached_tokens = num_cached_tokens
        if sequence.status is Status.RECEIVING:
            sequence.num_computed_tokens = num_cached_tokens
        self.counters.num_prompt_tokens += sequence.num_prompt_tokens
        self.counters.num_prefix_hit_tokens += num_cached_tokens

    def preempt(self, sequence: EngineSequence) -> None:
        """A running sequence gives its blocks back, to host memory as far as that has room, and waits. No step in
        flight computes it."""
        assert sequence.num_in_flight_tokens == 0, f"{sequence.sequence_id} is in flight"
        self.counters.num_preemptions += 1
        self.counters.num_swapped_out += self.swap.move_out(sequence)
        self.requeue(sequence)

    def fail(self, sequence: EngineSequence, error: TandemError) -> None:
        """Ends a sequence with an error that its client gets."""
        self.failed.append(SequenceFailed(sequence.sequence_id, error))
        self.finish(sequence)

    def requeue(self, sequence: EngineSequence) -> None:
        """Frees a sequence's blocks; it starts anew before all that wait. It fails where prompts are not computed here
        and host memory has no copy of it."""
        if not (self.config.recomputes or sequence.host_slots):
            self.fail(sequence, _lost_blocks())
            return
        self.tables.free(sequence, returns=True)
        sequence.num_computed_tokens = 0
        sequence.num_cached_tokens = 0
        sequence.preempted_at = self.clock()
        sequence.paced_from_s = None
        self.sequences.preempt(sequence)
        if self.speculator is not None:
            self.speculator.lost(sequence.sequence_id)

    def finish(self, sequence: EngineSequence) -> None:
        """A sequence leaves for good, for whatever cause; its sealed blocks stay in the pool as prefix."""
        self.sequences.end(sequence)
        self.pacing.ended(sequence, self.clock())
        if self.speculator is not None:
            self.speculator.ended(sequence.sequence_id)
        self.offer(sequence)
        self.swap.drop(sequence)
        self.free_if_complete(sequence)

    def offer(self, sequence: EngineSequence) -> None:
        """Notes which of its sealed blocks the index and the store nodes may want: those that no hand-off brought."""
        computed = sequence.num_computed_tokens // self.pool.block_size * self.groups.size
        if computed > sequence.num_arrived_blocks:
            hashes = tuple(sequence.block_hashes[:computed])
            kept = self.tables.worth_storing(sequence, sequence.num_computed_tokens)
            self.ended.append(SequenceEnded(hashes, kept, sequence.tenant, sequence.retain_s, sequence.priority))

    def free_if_complete(self, sequence: EngineSequence) -> None:
        """Frees a finished sequence's blocks once no step in flight writes to them: the next owner may be a receive."""
        if sequence.num_in_flight_tokens == 0:
            self.tables.free(sequence)

    def end_search(self, root: str) -> None:
        """Ends a beam search with all its sequences."""
        for sequence in self.beams.end(root):
            if sequence.status is not Status.FINISHED:
                self.sequences.end(sequence)
                self.swap.drop(sequence)
            self.free_if_complete(sequence)


def _lost_blocks() -> Overloaded:
    return Overloaded("the answer gave its blocks back, and prompts are not computed here")
