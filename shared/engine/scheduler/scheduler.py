"""Continuous batching with chunked prefill over the block pool. Pure policy: plain numbers in, a plan out.

Each step takes every running sequence that is down to its newest token first (decode), then chunks of prompts in the
order that `PromptOrder` gives, under one budget of tokens; with a target, also within the time that the running answers
bear (`Pacing`). A sequence starts when the pool has room for it and for what all are expected to grow, and when the
batch then still keeps the target of time a step.

Out of blocks, the youngest running sequence of the lowest priority gives its blocks back and waits. They are copied to
host memory while that has room, and only those come back that did not survive in the pool; without room the sequence is
computed again. A prompt that cannot start for want of blocks, or of a place in the batch, takes those of sequences with
less priority.

A step that only decodes may also compute guesses of what its answers go on with (`shared.engine.speculation`): those
that are right are tokens of the same step. The KV of the others lies behind all computed tokens, and is written over.

A step may be planned while the one before still runs. Then every sequence is assumed to continue, but those with
guesses, which sit out a step until their newest token is known; guesses are made only while no step is in flight. If
one turns out to have ended, what the later step computes for it is thrown away, and its blocks are given back only when
no step in flight writes to them any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from shared.engine.messages import NewToken, SequenceEnded, SequenceFailed, StepOutput
from shared.engine.plan import NoToken, PlannedSequence, SampledToken, StepPlan, StepResult, step_work
from shared.engine.scheduler.beams import BeamSearches
from shared.engine.scheduler.blocks import Admission, BatchLimit, GrowthReserve
from shared.engine.scheduler.config import SchedulerConfig as SchedulerConfig
from shared.engine.scheduler.config import SchedulerCounters
from shared.engine.scheduler.host_swap import HostSwap
from shared.engine.scheduler.pacing import Pacing, StepRoom
from shared.engine.scheduler.sequence_table import PromptOrder, SequenceTable, StepsInFlight, UnsentBlocks
from shared.engine.scheduler.tables import WANTED, block_tables, held_of
from shared.engine.sequence import EngineSequence, Goal, Status
from shared.engine.speculation.speculator import Speculator
from shared.errors import Overloaded, TandemError, TransferFailed
from shared.kv.groups import KVGroups
from shared.kv.pool import BlockPool, OutgoingBlock
from shared.sizing.step_fit import StepTimeFit
from shared.sizing.step_time import StepWork

MAX_STEP_TARGETS = 256
"""Prompt tokens of a step whose logits are all kept, for their log-probabilities: each takes the vocabulary in fp32."""


class Scheduler:
    """Decides each step; owns the sequences and the pool. Not thread-safe: the engine thread alone calls it."""

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        step_fit: StepTimeFit | None = None,
        groups: KVGroups | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """`clock` gives seconds; `step_fit` predicts steps, and learns from those that are measured. `groups`: of KV;
        None: one that keeps everything. Without a `speculator` nothing is guessed."""
        self.pool = pool
        self.groups = groups or KVGroups(pool.block_size)
        """What blocks are of; its size is the number of places of a block of tokens."""
        self.config = config
        self._clock = clock
        self.counters = SchedulerCounters()
        self.sequences = SequenceTable()
        """The live ones; others only read it."""
        self._started: list[tuple[str, int]] = []
        self._ended: list[SequenceEnded] = []
        self._failed: list[SequenceFailed] = []
        self._in_flight = StepsInFlight()
        self._tables = block_tables(pool, self.groups, config.max_num_batched_tokens)
        growth = GrowthReserve(self.groups, config.output_quantile, config.first_output_guess)
        self.step_fit = step_fit or StepTimeFit()
        self._batch_limit = BatchLimit(config.tpot_target_s, self.step_fit)
        self._admission = Admission(pool, config.max_num_seqs, growth, self._batch_limit)
        self._pacing = Pacing(config.tpot_target_s, config.itl_target_s, self.step_fit)
        self._speculator = speculator
        self._ends_s = 0.0  # when the newest planned step is expected to end
        self._swap = HostSwap(pool, config.num_host_blocks, self.groups.size)
        self._beams = BeamSearches(
            pool, self.sequences, self._tables, self._swap, config.max_num_seqs, clock, is_plain=self.groups.is_plain
        )
        self._order = PromptOrder(config.max_overtaken_s)
        self._unsent = UnsentBlocks(int(config.max_unsent_share * pool.num_blocks))

    def set_tpot_target(self, seconds: float) -> None:
        """Bounds steps by this time between two tokens of an answer in place of the config's; 0 = by none."""
        self._pacing.set_target(seconds, self.config.itl_target_s)
        self._batch_limit.target_s = seconds

    # --- sequences in and out

    def add(self, sequence: EngineSequence) -> None:
        """Queues a sequence to be computed here; takes no blocks yet. What the pool has of it now is not counted as
        work: routers would take it for prompts of others."""
        self._beams.begin(sequence)
        cached = self._tables.cached(sequence, sequence.num_tokens - 1)
        sequence.num_found_tokens = len(cached) // self.groups.size * self.pool.block_size
        self.sequences.add(sequence, self._clock())

    def reserve(self, sequence: EngineSequence) -> list[int]:
        """Takes blocks for a sequence whose KV will arrive: its cached prefix, and room for the rest of its tokens
        and one more. Returns the places of the blocks that must arrive. Raises Overloaded, and then nothing is taken:
        the blocks must be free beside what all running sequences and this one are expected to grow.
        """
        holders = self.sequences.holders
        self._admission.check_batch(sequence, holders)
        self._beams.check_ends(sequence)
        block_size, num_groups = self.pool.block_size, self.groups.size
        table = self._tables.before_arrival(sequence)
        wanted = [place for place, block_id in enumerate(table) if block_id == WANTED]
        cached = held_of(table)
        self._admission.take_cached(sequence, cached, len(cached) + len(wanted), holders)
        self._beams.begin(sequence)
        self.sequences.add(sequence, self._clock(), receiving=True)
        for place, block_id in zip(wanted, self.pool.allocate(len(wanted)), strict=True):
            table[place] = block_id
        sequence.block_ids = table
        self._tables.arriving(sequence)
        num_cached = min(wanted[0] // num_groups, sequence.num_tokens // block_size)
        self._count_prefix(sequence, num_cached * block_size)
        sequence.started = True
        num_arriving = -(-sequence.num_tokens // block_size) * num_groups
        return [place for place in wanted if place < num_arriving]

    def join(self, sequence_id: str, first_token: int, checksums: dict[int, int], first_bad_block: int | None) -> None:
        """A reserved sequence's blocks have arrived: it runs from the next step on, or is done if `first_token`
        ended it. Blocks from place `first_bad_block` on are not trusted: their tokens are computed again here. With
        windows that may need tokens before them too, and the sequence starts anew with what the pool has.
        """
        sequence = self.sequences[sequence_id]
        assert sequence.status is Status.RECEIVING
        block_size, num_groups = self.pool.block_size, self.groups.size
        computed = sequence.num_tokens
        if first_bad_block is not None:
            computed = first_bad_block // num_groups * block_size
        sequence.num_computed_tokens = computed
        sequence.num_arrived_blocks = computed // block_size * num_groups
        sequence.num_cached_tokens = min(sequence.num_cached_tokens, computed)
        self._tables.seal(sequence, 0)
        for index in range(sequence.num_arrived_blocks):
            if index in checksums:
                self.pool.set_checksum(sequence.block_ids[index], checksums[index])
        if sequence.search:
            # Its beams begin with what is likeliest behind the prompt, which takes the logits of its last token.
            sequence.check()
            self._wait_again(sequence)
            return
        sequence.token_ids.append(first_token)
        self._pacing.began(sequence, self._clock())
        sequence.check()
        if sequence.finish_reason() is not None:
            self._admission.ended(sequence)
            self._retire(sequence)
        elif first_bad_block is not None and not self.config.recomputes:
            sequence.token_ids.pop()  # another worker chooses it anew
            self._fail(sequence, TransferFailed("blocks arrived damaged, and prompts are not computed here"))
        elif first_bad_block is not None and not self.groups.is_plain:
            self._wait_again(sequence)
        else:
            self.sequences.run(sequence)

    def abort(self, sequence_id: str) -> bool:
        """Forgets a sequence and gives its blocks back; False where it is unknown (already done)."""
        if sequence_id in self._beams:
            self._end_search(sequence_id)
            return True
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return False
        if sequence.status is Status.RUNNING:
            self._admission.ended(sequence)  # a stop string, which the router finds, or a client that left
        self._retire(sequence)
        return True

    # --- steps

    @property
    def has_work(self) -> bool:
        """True where `schedule` may return a plan."""
        return bool(self.sequences.running or self.sequences.waiting)

    def schedule(self) -> StepPlan:
        """The next step, in flight until `apply`. Changes the pool (allocates, preempts), starts waiting sequences.

        Empty where there is nothing to compute, or where the result of the step in flight decides what comes next.
        At most one step may be in flight.
        """
        if not self._give_way():
            return StepPlan(())
        decodes: list[EngineSequence] = []
        prompts: list[EngineSequence] = []
        for sequence in self.sequences.running:
            if sequence.ends_in_flight or sequence.num_in_flight_samples > (not sequence.search):
                continue  # it ends, or which of its guesses are right, or which beams go on, is not known yet
            num_unplanned = sequence.num_unplanned_tokens
            if num_unplanned == 1:
                decodes.append(sequence)
            elif num_unplanned > 1:
                prompts.append(sequence)
        planned: dict[str, PlannedSequence] = {}
        if not self._plan_decodes(decodes, planned):
            return StepPlan(())
        num_decoding = len(planned)
        budget = self.config.max_num_batched_tokens - num_decoding
        begin_s = max(self._clock(), self._ends_s) if self._in_flight else self._clock()
        room = self._pacing.room(planned, self.sequences, begin_s)
        if budget > 0 and not self._plan_prompts(prompts, planned, budget, room):
            return StepPlan(())
        if self._speculator is not None and budget > 0 and len(planned) == num_decoding and not self._in_flight:
            self._plan_guesses(self._speculator, planned, budget, room)
        self._ends_s = begin_s + room.predicted_s()
        sequences = [self.sequences[name] for name in planned]
        begins = self._speculator is not None and self._speculator.follows_steps
        copies = self._swap.take_copies()
        return self._in_flight.begin(list(planned.values()), sequences, copies, begins_guesses=begins)

    def apply(self, plan: StepPlan, result: StepResult, step_s: float | None = None) -> StepOutput:
        """Takes the result of the oldest step in flight: lengths move on, full blocks are sealed, ended sequences
        leave. A sequence that no token could be chosen for fails (`take_failed`). If its numbers broke, its blocks
        leave the prefix cache: the cause may lie in any of them. `step_s`: how long the step took, in seconds, where
        that was measured.
        """
        if plan.is_empty:
            return StepOutput()
        if step_s is not None:
            self._learn(plan, step_s)
        sequences = self._in_flight.complete(plan)
        tokens: list[NewToken] = []
        blocks: list[OutgoingBlock] = []
        row, targets, pooled = 0, iter(result.targets), iter(result.pooled)
        for item, sequence in zip(plan.sequences, sequences, strict=True):
            begin, row = row, row + len(item.samples)
            chosen = result.sampled[begin:row]
            if item.targets:
                sequence.prompt_logprobs.update(enumerate(next(targets), item.start + 1))
            if item.num_pooled:
                sequence.add_pooled(item.num_pooled, next(pooled))
            if sequence.status is Status.FINISHED:  # ended or aborted while the step ran
                self._free_if_complete(sequence)
                continue
            if not chosen:
                sequence.num_computed_tokens = item.end
                self._tables.seal(sequence, item.start)
                blocks += self._ship(sequence, item.end // self.pool.block_size)
                self._tables.give_back_unseen(sequence)
                sequence.check()
            else:
                self._take(item, sequence, chosen, tokens, blocks)
        return StepOutput(tuple(tokens), tuple(blocks))

    def _take(
        self,
        item: PlannedSequence,
        sequence: EngineSequence,
        chosen: Sequence[SampledToken | NoToken],
        tokens: list[NewToken],
        blocks: list[OutgoingBlock],
    ) -> None:
        """Adds what was chosen for a sequence to its tokens and to the step's: one, and those behind right guesses, as
        far as none ends it."""
        if sequence.search and sequence.goal is Goal.COMPLETION:
            self._take_beam(item, sequence, chosen[0], tokens)
            return
        num_before = len(sequence.token_ids)
        finish_reason, failed = None, None
        if sequence.sampling.pooling and isinstance(chosen[0], SampledToken):
            found = sequence.pooled_bytes
            if found is None:
                lost = Overloaded("the prompt gave its blocks back before it was pooled", field="pooling")
                self._failed.append(SequenceFailed(item.sequence_id, lost))
                self._retire(sequence)
                return
            chosen = (chosen[0]._replace(pooled=found),)
        for token in chosen[: item.num_kept(chosen)] if item.guesses else chosen:
            if isinstance(token, NoToken):
                failed = token
                break
            sequence.token_ids.append(token.token_id)
            finish_reason = sequence.finish_reason()
            preempted_s = sequence.preempted_s if finish_reason is not None else 0.0
            prompt_logprobs = sequence.take_prompt_logprobs()
            tokens.append(NewToken(item.sequence_id, token, finish_reason, prompt_logprobs, preempted_s))
            if finish_reason is not None:
                break
        num_taken = len(sequence.token_ids) - num_before
        if item.guesses and self._speculator is not None:
            self._speculator.verified(item.sequence_id, len(item.guesses), max(0, num_taken - 1))
        if num_taken:
            # The KV behind the last right guess is of tokens that the answer does not have.
            sequence.num_computed_tokens = item.end - (len(chosen) - num_taken)
            self._tables.keep_guessed(sequence, item.start)
            self._tables.seal(sequence, item.start)
            if sequence.goal is Goal.FIRST_TOKEN:
                blocks += self._ship(sequence, -(-item.end // self.pool.block_size))
            self._tables.give_back_unseen(sequence)
            if sequence.paced_from_s is None:
                self._pacing.began(sequence, self._clock())
            sequence.check()
        if failed is not None:
            self._failed.append(SequenceFailed(item.sequence_id, failed.error(sequence.num_tokens)))
            if failed.structure is None:
                self.pool.forget(held_of(sequence.block_ids))
            self._retire(sequence)
        elif finish_reason is not None or sequence.goal is Goal.FIRST_TOKEN:
            self._admission.ended(sequence)
            self._retire(sequence)

    def _take_beam(
        self, item: PlannedSequence, sequence: EngineSequence, chosen: SampledToken | NoToken, tokens: list[NewToken]
    ) -> None:
        """Passes what may come next on to the beam's search, which goes on once it has that of all its beams."""
        sequence.num_computed_tokens = item.end
        self._tables.seal(sequence, item.start)
        self._tables.give_back_unseen(sequence)
        sequence.check()
        if isinstance(chosen, NoToken):
            self._failed.append(SequenceFailed(sequence.search, chosen.error(sequence.num_tokens)))
            self.pool.forget(held_of(sequence.block_ids))
            self._end_search(sequence.search)
            return
        if sequence.sequence_id == sequence.search and sequence.num_output_tokens == 0:
            self._offer(sequence)  # its prompt; answers that were dropped are no prefix of anything
        found, ended = self._beams.take(sequence, chosen)
        tokens += found
        for beam in ended:
            self._free_if_complete(beam)

    def _end_search(self, root: str) -> None:
        for sequence in self._beams.end(root):
            if sequence.status is not Status.FINISHED:
                self.sequences.end(sequence)
                self._swap.drop(sequence)
            self._free_if_complete(sequence)

    def measured(self, work: StepWork, step_s: float, drafting_s: float = 0.0, *, is_clean: bool = True) -> None:
        """Learns from a step that has run, of which a draft model had `drafting_s`; one that is not clean, with copies
        or guesses, did more than this work."""
        if is_clean:
            self.step_fit.observe(work, step_s - drafting_s)
            self._batch_limit.measured(work)
        self._pacing.measured(work, step_s)

    def _learn(self, plan: StepPlan, step_s: float) -> None:
        num_guesses, speculator = plan.num_guesses, self._speculator
        drafting_s = speculator.take_drafting_s() if speculator is not None else 0.0
        is_asking = speculator is not None and not speculator.is_resting
        only_decodes = is_asking and all(item.is_decode for item in plan.sequences)
        work = _plain(plan.sequences) if only_decodes else step_work(plan)
        self.measured(work, step_s, drafting_s, is_clean=not plan.copies and not num_guesses)
        if only_decodes and speculator is not None and not plan.copies:
            speculator.measured(
                work.num_sequences, num_guesses, self._predicted_s(work), step_s - drafting_s, drafting_s
            )

    def _predicted_s(self, work: StepWork) -> float:
        """Of a step; 0 where nothing is known."""
        times = self.step_fit.times
        return times.step_s(work) if times is not None else 0.0

    def take_started(self) -> list[tuple[str, int]]:
        """(sequence id, cached tokens) of those that since the last call got their first turn, or found more."""
        started, self._started = self._started, []
        return started

    def take_ended(self) -> list[SequenceEnded]:
        """Those that left since the last call with more sealed blocks than a hand-off brought."""
        ended, self._ended = self._ended, []
        return ended

    def take_failed(self) -> list[SequenceFailed]:
        """Those that left since the last call because no token could be chosen for them."""
        failed, self._failed = self._failed, []
        return failed

    # --- what others may know

    @property
    def num_growth_blocks(self) -> int:
        """Blocks that those sequences are expected to take beyond what they hold; there may be fewer."""
        return self._admission.growth(self.sequences.holders)

    def least_slack_s(self, decoding: StepWork) -> float | None:
        """How far the running answer nearest to missing its target is ahead; None without any, or without a target.
        `decoding`: a step of all of them, as the table has it."""
        return self._pacing.least_slack_s(self.sequences.running, decoding, self._clock())

    def check_integrity(self) -> None:
        """Asserts that sequences and pool agree; called by tests and by idle workers."""
        self.pool.check_integrity()
        self._beams.check()
        self.sequences.check(self.pool.block_size, self.groups.size)
        slots = self.sequences.host_slots
        assert len(set(slots)) == len(slots) == self._swap.num_used, "each slot in use is some sequence's"
        assert not self._swap.has_copies, "copies were left out of the step that they were meant for"

    # --- inside

    def _start(self, sequence: EngineSequence) -> bool:
        """Gives a waiting sequence its cached prefix, and what host memory holds of it; False where it cannot start
        yet. Blocks for the rest of its tokens are free then."""
        holders = self.sequences.holders
        try:
            self._admission.check_batch(sequence, holders)
        except Overloaded:
            return False
        while True:
            # The last token is always computed, to have its logits.
            cached = self._tables.cached(sequence, sequence.num_tokens - 1)
            try:
                self._admission.take_cached(sequence, held_of(cached), self._tables.num_needed(sequence), holders)
                break
            except Overloaded:
                if not self._beams.give_back():
                    return False
        self.sequences.run(sequence)
        sequence.num_found_tokens = 0
        if sequence.preempted_at:
            sequence.preempted_s += self._clock() - sequence.preempted_at
            sequence.preempted_at = 0.0
        sequence.block_ids = cached
        num_cached = len(cached) // self.groups.size * self.pool.block_size
        self.counters.num_swapped_in += bool(sequence.host_slots)
        sequence.num_computed_tokens = self._swap.move_in(sequence)
        self._tables.give_back_unseen(sequence)
        self._tables.seal(sequence, num_cached)
        if not sequence.started:
            self._count_prefix(sequence, num_cached)
            sequence.started = True
            self._started.append((sequence.sequence_id, sequence.num_cached_tokens))
        elif not self.config.recomputes and sequence.num_unplanned_tokens > 1:
            self._fail(sequence, _lost_blocks())
            return False
        return True

    def _give_way(self) -> bool:
        """Starts waiting sequences that have more priority than one that runs, which gives its blocks back as need be;
        False where the step in flight must end first."""
        if not self.sequences.waiting or not self.sequences.running or self.sequences.running[-1].priority == 0:
            return True
        for sequence in self._order.sort((), tuple(self.sequences.waiting), self._clock()):
            if self._lower(sequence) is None or self._unsent.is_full(sequence.receiver):
                break
            while not self._start(sequence) and sequence.status is Status.WAITING:
                victim = self._lower(sequence)
                if victim is None:
                    return True
                if self._in_flight:
                    return False  # its copies would wait for the next step, and its blocks could be given to receives
                self._preempt(victim)
        return True

    def _lower(self, sequence: EngineSequence) -> EngineSequence | None:
        """The running sequence that gives way to this one first, if any does."""
        last = self.sequences.running[-1] if self.sequences.running else None
        return last if last is not None and last.priority < sequence.priority else None

    def _skip_cached(self, sequence: EngineSequence) -> None:
        """Blocks of the prompt that came into the pool since the sequence started, fetched or computed for another
        one, need not be computed: it continues behind them."""
        num_tokens = self._tables.take_found(sequence)
        if num_tokens:
            sequence.num_computed_tokens += num_tokens
            sequence.num_cached_tokens += num_tokens
            self.counters.num_prefix_hit_tokens += num_tokens
            self._started.append((sequence.sequence_id, sequence.num_cached_tokens))

    def _count_prefix(self, sequence: EngineSequence, num_cached_tokens: int) -> None:
        num_cached_tokens = min(num_cached_tokens, sequence.num_prompt_tokens)
        sequence.num_cached_tokens = num_cached_tokens
        if sequence.status is Status.RECEIVING:
            sequence.num_computed_tokens = num_cached_tokens
        self.counters.num_prompt_tokens += sequence.num_prompt_tokens
        self.counters.num_prefix_hit_tokens += num_cached_tokens

    def _plan_decodes(self, ready: Sequence[EngineSequence], planned: dict[str, PlannedSequence]) -> bool:
        """One token each; False where the step in flight must end first, since no sequence can be preempted before."""
        is_ahead = len(self._in_flight) > 0
        for sequence in ready:
            if len(planned) == self.config.max_num_batched_tokens:
                break
            if sequence.status is not Status.RUNNING:  # preempted by an earlier one of this step
                continue
            if not self._tables.grow(sequence, 1):
                if is_ahead:
                    return False
                if not self._make_room(sequence, 1, planned):
                    continue
            planned[sequence.sequence_id] = self._in_flight.share(sequence, 1)
        return True

    def _plan_prompts(
        self, ready: Sequence[EngineSequence], planned: dict[str, PlannedSequence], budget: int, room: StepRoom
    ) -> bool:
        """Chunks of prompts, those that start included; False as in `_plan_decodes`."""
        running = [s for s in ready if s.status is Status.RUNNING]
        num_targets_left = MAX_STEP_TARGETS
        may_start = True
        for sequence in self._order.sort(running, tuple(self.sequences.waiting), self._clock()):
            if budget == 0 or room.is_full:
                break
            if sequence.status is Status.WAITING:
                if not may_start or self._unsent.is_full(sequence.receiver):
                    continue
                may_start = self._start(sequence)  # none behind one that waits for blocks starts before it
                if not may_start:
                    continue
            self._skip_cached(sequence)
            count = min(budget, self._in_a_chunk(sequence), self._tables.tokens_before_found(sequence, budget))
            count = room.most(sequence.num_planned_tokens, count)
            if sequence.sampling.prompt_logprobs is not None:
                count = min(count, num_targets_left)
                num_targets_left -= count
            if not count:
                continue
            if self._in_flight and not self._tables.grow(sequence, count):
                # Copies that were decided must be done before anything else happens to their blocks.
                return self._swap.has_copies
            if self._make_room(sequence, count, planned):
                room.take(sequence.num_planned_tokens, count)
                planned[sequence.sequence_id] = self._in_flight.share(sequence, count)
                budget -= count
        return True

    def _in_a_chunk(self, sequence: EngineSequence) -> int:
        """Tokens up to the end, or to a last chunk whose blocks are few enough to be waited for."""
        left, last, size = sequence.num_unplanned_tokens, self.config.max_last_chunk, self.pool.block_size
        if not 0 < last < left or not sequence.ship_blocks:
            return left
        begin = -(-(sequence.num_planned_tokens + left - last) // size) * size
        return min(left, begin - sequence.num_planned_tokens)

    def _plan_guesses(
        self, speculator: Speculator, planned: dict[str, PlannedSequence], budget: int, room: StepRoom
    ) -> None:
        """Adds guesses to the shares of a step that only decodes, as far as there are blocks for them that no sequence
        will miss."""
        sequences = [self.sequences[name] for name, item in planned.items() if item.is_decode]
        # The runner counts what it has sampled for penalties, what is not kept too.
        sequences = [s for s in sequences if s.goal is Goal.COMPLETION and not s.has_penalties and not s.search]
        if speculator.rests(len(sequences)):
            return
        plain_s = self._predicted_s(_plain(planned.values()))
        size, block_size = self.groups.size, self.pool.block_size
        spare = size * len(self.sequences.running)
        for sequence in sequences:
            ahead = speculator.num_written_ahead(sequence)
            if ahead > 0 and self.pool.num_free > spare:
                self._tables.grow_ahead(sequence, 1 + ahead)
        guessed = speculator.propose(sequences, budget, plain_s, room.limit_s)
        for sequence_id, guesses in guessed.items():
            sequence, item = self.sequences[sequence_id], planned[sequence_id]
            num_free = max(0, self.pool.num_free - spare)
            if self.groups.num_states:
                guesses = guesses[: num_free // self.groups.num_states]
            if not num_free:
                guesses = guesses[: len(sequence.block_ids) // size * block_size - item.end]
            if guesses and self._tables.grow_for_guesses(sequence, len(guesses)):
                planned[sequence_id] = self._in_flight.with_guesses(item, sequence, guesses)

    def _make_room(self, sequence: EngineSequence, count: int, planned: dict[str, PlannedSequence]) -> bool:
        """Grows a running sequence, preempting younger ones as needed; False where it had to go itself."""
        while not self._tables.grow(sequence, count):
            if self._beams.give_back():
                continue
            victim = next((s for s in reversed(self.sequences.running) if s.sequence_id not in planned), sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: EngineSequence) -> None:
        assert sequence.num_in_flight_tokens == 0, f"{sequence.sequence_id} is in flight"
        self.counters.num_preemptions += 1
        self.counters.num_swapped_out += self._swap.move_out(sequence)
        self._wait_again(sequence)

    def _fail(self, sequence: EngineSequence, error: TandemError) -> None:
        self._failed.append(SequenceFailed(sequence.sequence_id, error))
        self._retire(sequence)

    def _wait_again(self, sequence: EngineSequence) -> None:
        """Takes a sequence's blocks; it starts anew before all that wait. One that would have to be computed anew fails
        where that is for other workers."""
        if not (self.config.recomputes or sequence.host_slots):
            self._fail(sequence, _lost_blocks())
            return
        self._tables.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_cached_tokens = 0
        sequence.preempted_at = self._clock()
        sequence.paced_from_s = None
        self.sequences.preempt(sequence)
        if self._speculator is not None:
            self._speculator.lost(sequence.sequence_id)

    def _ship(self, sequence: EngineSequence, end_block: int) -> list[OutgoingBlock]:
        due = self._tables.ship(sequence, end_block)
        self._unsent.add(sequence.receiver, len(due))
        return due

    def release(self, block_ids: Sequence[int], receiver: bytes = b"") -> None:
        """Gives back the references of the shipper to that receiver."""
        self.pool.release(block_ids)
        self._unsent.remove(receiver, len(block_ids))

    def _retire(self, sequence: EngineSequence) -> None:
        self.sequences.end(sequence)
        self._pacing.ended(sequence, self._clock())
        if self._speculator is not None:
            self._speculator.ended(sequence.sequence_id)
        self._offer(sequence)
        self._swap.drop(sequence)
        self._free_if_complete(sequence)

    def _offer(self, sequence: EngineSequence) -> None:
        """Says which of its blocks others may want."""
        computed = sequence.num_computed_tokens // self.pool.block_size * self.groups.size
        if computed > sequence.num_arrived_blocks:
            hashes = tuple(sequence.block_hashes[:computed])
            kept = self._tables.worth_storing(sequence, sequence.num_computed_tokens)
            self._ended.append(SequenceEnded(hashes, kept, sequence.tenant, sequence.retain_s, sequence.priority))

    def _free_if_complete(self, sequence: EngineSequence) -> None:
        """Gives back a finished sequence's blocks once no step in flight writes to them: a receive might, next."""
        if sequence.num_in_flight_tokens == 0:
            self._tables.free(sequence)


def _lost_blocks() -> Overloaded:
    return Overloaded("the answer gave its blocks back, and prompts are not computed here")


def _plain(items: Collection[PlannedSequence]) -> StepWork:
    """Of a step that only decodes, without its guesses."""
    return StepWork(len(items), sum([item.start + 1 for item in items]))
