"""The scheduler: sequences come in, each step is planned, and its result is applied. Pure policy: plain numbers in, a
plan out.

`StepPlanner` says what a step holds, `Lifecycle` what happens to a sequence when it starts, is preempted or ends.

A step may be planned while the one before still runs, unless either has guesses. Then every sequence is assumed to
continue. If one turns out to have ended, what the later step computes for it is thrown away, and its blocks are given
back only when no step in flight writes to them any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shared.engine.messages import NewToken, SequenceEnded, SequenceFailed, StepOutput
from shared.engine.plan import NoToken, PlannedSequence, SampledToken, StepPlan, StepResult, decode_work, step_work
from shared.engine.scheduler.block_tables import WANTED, held_of
from shared.engine.scheduler.config import SchedulerConfig as SchedulerConfig
from shared.engine.scheduler.lifecycle import Lifecycle
from shared.engine.scheduler.sequence_table import StepsInFlight, UnsentBlocks
from shared.engine.scheduler.step_planner import StepPlanner
from shared.engine.sequence import EngineSequence, Status
from shared.engine.speculation.speculator import Speculator
from shared.errors import Overloaded, TransferFailed
from shared.kv.groups import KVGroups
from shared.kv.pool import BlockPool, OutgoingBlock
from shared.sizing.step_fit import StepTimeFit
from shared.sizing.step_time import StepWork


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
        self._lifecycle = parts = Lifecycle(pool, config, clock, step_fit, groups, speculator)
        self.pool = pool
        self.groups = parts.groups
        """What blocks are of; its size is the number of places of a block of tokens."""
        self.config = config
        self.counters = parts.counters
        self.sequences = parts.sequences
        """The live ones; others only read it."""
        self.step_fit = parts.step_fit
        self._clock = clock
        self._tables = parts.tables
        self._swap = parts.swap
        self._beams = parts.beams
        self._admission = parts.admission
        self._pacing = parts.pacing
        self._speculator = speculator
        self._in_flight = StepsInFlight()
        self._unsent = UnsentBlocks(int(config.max_unsent_share * pool.num_blocks))
        self._planner = StepPlanner(parts, self._in_flight, self._unsent)

    def set_tpot_target(self, seconds: float) -> None:
        """Bounds steps by this time between two tokens of an answer in place of the config's; 0 = by none."""
        self._pacing.set_target(seconds, self.config.itl_target_s)
        self._lifecycle.batch_limit.target_s = seconds

    # --- sequences in and out

    def add(self, sequence: EngineSequence) -> None:
        """Queues a sequence to be computed here; takes no blocks yet. What the pool has of it now is not counted as
        work: routers would take it for prompts of others."""
        self._beams.begin(sequence)
        self.pool.begin_turn(sequence.session)
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
        self.pool.begin_turn(sequence.session)
        self.sequences.add(sequence, self._clock(), receiving=True)
        for place, block_id in zip(wanted, self.pool.allocate(len(wanted)), strict=True):
            table[place] = block_id
        sequence.block_ids = table
        self._tables.arriving(sequence)
        num_cached = min(wanted[0] // num_groups, sequence.num_tokens // block_size)
        self._lifecycle.count_prefix(sequence, num_cached * block_size)
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
            self._lifecycle.requeue(sequence)
            return
        sequence.token_ids.append(first_token)
        self._pacing.began(sequence, self._clock())
        sequence.check()
        if sequence.finish_reason() is not None:
            self._admission.ended(sequence)
            self._lifecycle.finish(sequence)
        elif first_bad_block is not None and not self.config.recomputes:
            sequence.token_ids.pop()  # another worker chooses it anew
            self._lifecycle.fail(sequence, TransferFailed("blocks arrived damaged, and prompts are not computed here"))
        elif first_bad_block is not None and not self.groups.is_plain:
            self._lifecycle.requeue(sequence)
        else:
            self.sequences.run(sequence)

    def abort(self, sequence_id: str) -> bool:
        """Forgets a sequence and gives its blocks back; False where it is unknown (already done)."""
        if sequence_id in self._beams:
            self._lifecycle.end_search(sequence_id)
            return True
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return False
        if sequence.status is Status.RUNNING:
            self._admission.ended(sequence)  # a stop string, which the router finds, or a client that left
        self._lifecycle.finish(sequence)
        return True

    def release(self, block_ids: Sequence[int], receiver: bytes = b"") -> None:
        """Gives back the references of the shipper to that receiver."""
        self.pool.release(block_ids)
        self._unsent.remove(receiver, len(block_ids))

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
        return self._planner.plan()

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
        row, targets, pooled, finished = 0, iter(result.targets), iter(result.pooled), Status.FINISHED
        for item, sequence in zip(plan.sequences, sequences, strict=True):
            begin, row = row, row + len(item.samples)
            chosen = result.sampled[begin:row]
            if item.targets:
                sequence.prompt_logprobs.update(enumerate(next(targets), item.start + 1))
            if item.num_pooled:
                sequence.add_pooled(item.num_pooled, next(pooled))
            if sequence.status is finished:  # ended or aborted while the step ran
                self._lifecycle.free_if_complete(sequence)
                continue
            if not chosen:
                sequence.num_computed_tokens = item.end
                self._tables.seal(sequence, item.start)
                blocks += self._ship(sequence, item.end // self.pool.block_size)
                self._tables.give_back_unseen(sequence)
                sequence.check()
            else:
                self._take(item, sequence, chosen, tokens, blocks)
        if self._speculator is not None:
            self._speculator.completed()
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
        if sequence.search and not sequence.ends_with_first_token:
            self._take_beam(item, sequence, chosen[0], tokens)
            return
        num_before = len(sequence.token_ids)
        finish_reason, failed = None, None
        if sequence.sampling.pooling and isinstance(chosen[0], SampledToken):
            found = sequence.pooled_bytes
            if found is None:
                lost = Overloaded("the prompt gave its blocks back before it was pooled", field="pooling")
                self._lifecycle.fail(sequence, lost)
                return
            chosen = (chosen[0]._replace(pooled=found),)
        has_guesses = len(item.samples) > 1
        for token in chosen[: item.num_kept(chosen)] if has_guesses else chosen:
            if isinstance(token, NoToken):
                failed = token
                break
            sequence.token_ids.append(token.token_id)
            finish_reason = sequence.finish_reason()
            preempted_s = sequence.preempted_s if finish_reason is not None else 0.0
            prompt_logprobs = sequence.take_prompt_logprobs() if sequence.prompt_logprobs else ()
            fields = (item.sequence_id, token, finish_reason, prompt_logprobs, preempted_s, (), 0, 0)
            tokens.append(tuple.__new__(NewToken, fields))
            if finish_reason is not None:
                break
        num_taken = len(sequence.token_ids) - num_before
        if has_guesses and self._speculator is not None:
            self._speculator.verified(item.sequence_id, len(item.guesses), max(0, num_taken - 1))
        if num_taken:
            # The KV behind the last right guess is of tokens that the answer does not have.
            sequence.num_computed_tokens = item.end - (len(chosen) - num_taken)
            if has_guesses:
                tokens[-num_taken] = tokens[-num_taken]._replace(
                    num_guessed=len(item.guesses), num_accepted=num_taken - 1
                )
                self._tables.keep_guessed(sequence, item.start)
            self._tables.seal(sequence, item.start)
            if sequence.ends_with_first_token:
                blocks += self._ship(sequence, -(-item.end // self.pool.block_size))
            self._tables.give_back_unseen(sequence)
            if sequence.paced_from_s is None:
                self._pacing.began(sequence, self._clock())
            sequence.check()
        if failed is not None:
            if failed.structure is None:
                self.pool.forget(held_of(sequence.block_ids))
            self._lifecycle.fail(sequence, failed.error(sequence.num_tokens))
        elif finish_reason is not None or sequence.ends_with_first_token:
            self._admission.ended(sequence)
            self._lifecycle.finish(sequence)

    def _take_beam(
        self, item: PlannedSequence, sequence: EngineSequence, chosen: SampledToken | NoToken, tokens: list[NewToken]
    ) -> None:
        """Gives a beam's likeliest next tokens to its search, which advances once it has those of all its beams."""
        sequence.num_computed_tokens = item.end
        self._tables.seal(sequence, item.start)
        self._tables.give_back_unseen(sequence)
        sequence.check()
        if isinstance(chosen, NoToken):
            self._lifecycle.failed.append(SequenceFailed(sequence.search, chosen.error(sequence.num_tokens)))
            self.pool.forget(held_of(sequence.block_ids))
            self._lifecycle.end_search(sequence.search)
            return
        if sequence.sequence_id == sequence.search and sequence.num_output_tokens == 0:
            self._lifecycle.offer(sequence)  # its prompt; answers that were dropped are no prefix of anything
        found, ended = self._beams.take(sequence, chosen)
        tokens += found
        for beam in ended:
            self._lifecycle.free_if_complete(beam)

    def _ship(self, sequence: EngineSequence, end_block: int) -> list[OutgoingBlock]:
        due = self._tables.ship(sequence, end_block)
        self._unsent.add(sequence.receiver, len(due))
        return due

    def measured(self, work: StepWork, step_s: float, drafting_s: float = 0.0, *, is_clean: bool = True) -> None:
        """Learns from a step that has run, of which a draft model had `drafting_s`; one that is not clean, with copies
        or guesses, or of answers alone and planned when the device was idle for the sake of guesses, took more than
        this work does."""
        if is_clean:
            self.step_fit.observe(work, step_s - drafting_s)
            self._lifecycle.batch_limit.measured(work)
        self._pacing.measured(work, step_s)

    def _learn(self, plan: StepPlan, step_s: float) -> None:
        num_guesses, speculator = plan.num_guesses, self._speculator
        drafting_s = speculator.take_drafting_s() if speculator is not None else 0.0
        is_asking = speculator is not None and not speculator.is_resting
        only_decodes = is_asking and all(item.is_decode for item in plan.sequences)
        work = decode_work(plan.sequences) if only_decodes else step_work(plan)
        # A prompt's step counts behind a wait too, which is short beside it: it has no other where answers guess.
        is_late = speculator is not None and speculator.has_waited and not work.num_chunk_tokens
        self.measured(work, step_s, drafting_s, is_clean=not plan.copies and not num_guesses and not is_late)
        if only_decodes and speculator is not None and not plan.copies:
            speculator.measured(
                work.num_sequences, num_guesses, self.step_fit.predicted_s(work), step_s - drafting_s, drafting_s
            )

    def take_started(self) -> list[tuple[str, int]]:
        """(sequence id, cached tokens) of those that since the last call got their first turn, or found more."""
        started, self._lifecycle.started = self._lifecycle.started, []
        return started

    def take_ended(self) -> list[SequenceEnded]:
        """The sequences that left since the last call with more sealed blocks than a hand-off brought."""
        ended, self._lifecycle.ended = self._lifecycle.ended, []
        return ended

    def take_failed(self) -> list[SequenceFailed]:
        """The sequences that left since the last call because no token could be chosen for them."""
        failed, self._lifecycle.failed = self._lifecycle.failed, []
        return failed

    # --- for load reports and tests

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
