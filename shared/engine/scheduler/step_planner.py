"""What a step holds: continuous batching with chunked prefill. Pure policy, part of the scheduler.

Each step takes every running sequence that is down to its newest token first (decode), then chunks of prompts in the
order that `PromptOrder` gives, under one budget of tokens; with a target, also within the time that the running answers
bear (`Pacing`). A sequence starts when the pool has room for it and for what all are expected to grow, and when the
batch then still keeps the target of time a step.

Out of blocks, the youngest running sequence of the lowest priority is preempted. A prompt that cannot start for want of
blocks, or of a place in the batch, preempts sequences of less priority.

A step that only decodes may also compute guesses of the next tokens (`shared.engine.speculation`): those that are right
are tokens of the same step. Where the answers bear only a part of the next prompt beside them, such steps come before
its chunk, as far as their guesses gain clearly. The KV of the others lies behind all computed tokens, and is written
over. Such a step is planned when no step is in flight, and none is planned while it is: where steps are planned ahead,
the one in flight is waited for where guesses behind it are worth that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.engine.plan import PlannedSequence, StepPlan, decode_work
from shared.engine.scheduler.lifecycle import Lifecycle
from shared.engine.scheduler.pacing import StepRoom
from shared.engine.scheduler.sequence_table import PromptOrder, StepsInFlight, UnsentBlocks
from shared.engine.sequence import EngineSequence, Goal, Status
from shared.engine.speculation.speculator import Speculator

MOST_BEFORE_A_CHUNK = 4
"""Steps of guesses alone that follow each other while a prompt waits for a larger chunk."""
TRIES_EVERY = 8
"""Steps with a prompt that waits of which one tries guesses, once a try has shown that they make it no sooner: asking
drafters takes time, a draft model's most."""
MAX_STEP_TARGETS = 256
"""Prompt tokens of a step whose logits are all kept, for their log-probabilities: each takes the vocabulary in fp32."""


class StepPlanner:
    """Chooses each step's sequences and how many tokens of each; starts and preempts sequences for it."""

    def __init__(self, lifecycle: Lifecycle, in_flight: StepsInFlight, unsent: UnsentBlocks) -> None:
        self._lifecycle = lifecycle
        self._in_flight = in_flight
        self._unsent = unsent
        self._pool = lifecycle.pool
        self._config = lifecycle.config
        self._clock = lifecycle.clock
        self._sequences = lifecycle.sequences
        self._tables = lifecycle.tables
        self._swap = lifecycle.swap
        self._pacing = lifecycle.pacing
        self._speculator = lifecycle.speculator
        self._order = PromptOrder(lifecycle.config.max_overtaken_s)
        self._ends_s = 0.0  # when the newest planned step is expected to end
        self._has_waited = False  # no step was planned behind the newest one, for the sake of guesses
        self._num_before_chunk = 0  # steps of guesses alone since the last one for which prompts were looked at
        self._num_without_try = 0  # steps to come that try no guesses before a chunk

    def plan(self) -> StepPlan:
        """The next step, in flight until `apply`. Changes the pool (allocates, preempts), starts waiting sequences.

        Empty where there is nothing to compute, or where the result of the step in flight decides what comes next.
        At most one step may be in flight.
        """
        if self._in_flight.has_guesses:
            return self._wait_for_guesses()
        if not self._preempt_by_priority():
            return StepPlan(())
        decodes: list[EngineSequence] = []
        prompts: list[EngineSequence] = []
        for sequence in self._sequences.running:
            num_plannable = sequence.num_plannable_tokens
            if num_plannable == 1:
                decodes.append(sequence)
            elif num_plannable > 1:
                prompts.append(sequence)
        planned: dict[str, PlannedSequence] = {}
        if not self._add_decodes(decodes, planned):
            return StepPlan(())
        num_decoding = len(planned)
        budget = self._config.max_num_batched_tokens - num_decoding
        begin_s = max(self._clock(), self._ends_s) if self._in_flight else self._clock()
        room = self._pacing.room(planned, self._sequences, begin_s)
        queue = self._queue(prompts) if budget > 0 else []
        were_tried = self._try_guesses_first(queue, planned, budget, room)
        has_guesses = were_tried and any(item.guesses for item in planned.values())
        self._num_before_chunk = self._num_before_chunk + 1 if has_guesses else 0
        if not has_guesses and not self._add_prompts(queue, planned, budget, room):
            return StepPlan(())
        only_decodes = budget > 0 and len(planned) == num_decoding > 0
        if self._speculator is not None and only_decodes and not were_tried:
            if not self._in_flight:
                self._take_guesses(self._proposed(self._speculator, planned, budget, room), planned)
            elif not self._swap.has_copies and self._awaits_guesses(self._speculator, planned, budget, room):
                return self._wait_for_guesses()
        self._ends_s = begin_s + room.predicted_s()
        sequences = self._sequences.of(planned)
        begins = self._speculator is not None and self._speculator.follows_steps
        copies = self._swap.take_copies()
        plan = self._in_flight.begin(list(planned.values()), sequences, copies, begins_guesses=begins)
        if self._speculator is not None and not plan.is_empty:
            self._speculator.planned(has_waited=self._has_waited)
        if not plan.is_empty or not self._in_flight:
            self._has_waited = False
        return plan

    def _wait_for_guesses(self) -> StepPlan:
        self._has_waited = True
        return StepPlan(())

    def _preempt_by_priority(self) -> bool:
        """Starts waiting sequences that have more priority than one that runs, which gives its blocks back as need be;
        False where the step in flight must end first."""
        if not self._sequences.waiting or not self._sequences.running or self._sequences.running[-1].priority == 0:
            return True
        for sequence in self._order.sort((), tuple(self._sequences.waiting), self._clock()):
            if self._victim_of(sequence) is None or self._unsent.is_full(sequence.receiver):
                break
            while not self._lifecycle.start(sequence) and sequence.status is Status.WAITING:
                victim = self._victim_of(sequence)
                if victim is None:
                    return True
                if self._in_flight:
                    # Its copies would wait for the next step, and its blocks could be given to receives; for the same
                    # reason there is a step where others have started that had copies.
                    return self._swap.has_copies
                self._lifecycle.preempt(victim)
        return True

    def _victim_of(self, sequence: EngineSequence) -> EngineSequence | None:
        """The running sequence that gives way to this one first, if any does."""
        last = self._sequences.running[-1] if self._sequences.running else None
        return last if last is not None and last.priority < sequence.priority else None

    def _add_decodes(self, ready: Sequence[EngineSequence], planned: dict[str, PlannedSequence]) -> bool:
        """One token each; False where the step in flight must end first, since no sequence can be preempted before."""
        is_ahead = len(self._in_flight) > 0
        running, most = Status.RUNNING, self._config.max_num_batched_tokens
        grow, share = self._tables.grow, self._in_flight.share
        for sequence in ready:
            if len(planned) == most:
                break
            if sequence.status is not running:  # preempted by an earlier one of this step
                continue
            if not grow(sequence, 1):
                if is_ahead:
                    return self._swap.has_copies
                if not self._make_room(sequence, 1, planned):
                    continue
            planned[sequence.sequence_id] = share(sequence, 1)
        return True

    def _queue(self, prompts: Sequence[EngineSequence]) -> list[EngineSequence]:
        """Those that are partly computed, less what was preempted for this step's answers, and those that wait."""
        running = [s for s in prompts if s.status is Status.RUNNING]
        return self._order.sort(running, tuple(self._sequences.waiting), self._clock())

    def _add_prompts(
        self, queue: Sequence[EngineSequence], planned: dict[str, PlannedSequence], budget: int, room: StepRoom
    ) -> bool:
        """Chunks of prompts, those that start included; False as in `_add_decodes`."""
        num_targets_left = MAX_STEP_TARGETS
        may_start = True
        for sequence in queue:
            if budget == 0 or room.is_full:
                break
            if sequence.status is Status.WAITING:
                if not may_start or self._unsent.is_full(sequence.receiver):
                    continue
                has_started = self._lifecycle.start(sequence)
                # None behind one that waits for blocks starts before it; one that failed waits for nothing.
                may_start = has_started or _has_failed(sequence)
                if not has_started:
                    continue
            self._lifecycle.skip_cached(sequence)
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
        left, last, size = sequence.num_unplanned_tokens, self._config.max_last_chunk, self._pool.block_size
        if not 0 < last < left or not sequence.ship_blocks:
            return left
        begin = -(-(sequence.num_planned_tokens + left - last) // size) * size
        return min(left, begin - sequence.num_planned_tokens)

    def _try_guesses_first(
        self, queue: Sequence[EngineSequence], planned: dict[str, PlannedSequence], budget: int, room: StepRoom
    ) -> bool:
        """Adds guesses in place of a chunk where the answers bear less than the next prompt's rest beside them, if
        prompts come sooner so: a step of guesses puts the answers ahead of their targets, and steps behind it have room
        for more. Whether they were tried."""
        if self._speculator is None or self._in_flight or not planned or not queue:
            return False
        if self._num_before_chunk >= MOST_BEFORE_A_CHUNK or room.limit_s >= self._pacing.greatest_gap_s:
            return False
        begin, count = queue[0].num_planned_tokens, min(budget, queue[0].num_missing_tokens)
        if room.most(begin, count) == count:
            return False
        if self._num_without_try:
            self._num_without_try -= 1
            return False
        guessed = self._proposed(self._speculator, planned, budget, room)
        expected = self._speculator.expected
        if guessed and self._pacing.come_sooner_apart(room.work, begin, budget, expected.tokens_each, expected.took_s):
            self._take_guesses(guessed, planned)
        elif guessed:
            self._num_without_try = TRIES_EVERY - 1
        return True

    def _proposed(
        self, speculator: Speculator, planned: Mapping[str, PlannedSequence], budget: int, room: StepRoom
    ) -> Mapping[str, tuple[int, ...]]:
        """Guesses for the sequences of a step that only decodes."""
        sequences = self._guessable(planned)
        if speculator.rests(len(sequences)):
            return {}
        plain_s = self._lifecycle.step_fit.predicted_s(decode_work(planned.values()))
        if speculator.needs_times(plain_s):
            return {}
        spare = self._num_spare_blocks
        for sequence in sequences:
            ahead = speculator.num_written_ahead(sequence)
            if ahead > 0 and self._pool.num_free > spare:
                self._tables.grow_ahead(sequence, 1 + ahead)
        return speculator.propose(sequences, budget, plain_s, room.limit_s)

    def _take_guesses(self, guessed: Mapping[str, tuple[int, ...]], planned: dict[str, PlannedSequence]) -> None:
        """Adds guesses to the shares of a step, as far as there are blocks for them that no sequence will miss."""
        groups, block_size = self._lifecycle.groups, self._pool.block_size
        for sequence_id, guesses in guessed.items():
            sequence, item = self._sequences[sequence_id], planned[sequence_id]
            num_free = max(0, self._pool.num_free - self._num_spare_blocks)
            if groups.num_states:
                guesses = guesses[: num_free // groups.num_states]
            if not num_free:
                guesses = guesses[: len(sequence.block_ids) // groups.size * block_size - item.end]
            if guesses and self._tables.grow_for_guesses(sequence, len(guesses)):
                planned[sequence_id] = self._in_flight.with_guesses(item, sequence, guesses)

    @property
    def _num_spare_blocks(self) -> int:
        """Free blocks that no guess may take: one of each KV group for each running sequence."""
        return self._lifecycle.groups.size * len(self._sequences.running)

    def _awaits_guesses(
        self, speculator: Speculator, planned: dict[str, PlannedSequence], budget: int, room: StepRoom
    ) -> bool:
        """Whether the step in flight is to end first, so that a step that only decodes may have guesses."""
        if self._pool.num_free <= self._num_spare_blocks:
            return False
        plain_s = self._lifecycle.step_fit.predicted_s(decode_work(planned.values()))
        return speculator.awaits(self._guessable(planned), budget, plain_s, room.limit_s)

    def _guessable(self, planned: Mapping[str, PlannedSequence]) -> list[EngineSequence]:
        """The sequences of a step that may have guesses."""
        sequences = [self._sequences[name] for name, item in planned.items() if item.is_decode]
        return [s for s in sequences if s.goal is Goal.COMPLETION and not s.search]

    def _make_room(self, sequence: EngineSequence, count: int, planned: dict[str, PlannedSequence]) -> bool:
        """Grows a running sequence, preempting younger ones as needed; False where it had to go itself."""
        while not self._tables.grow(sequence, count):
            if self._lifecycle.beams.give_back():
                continue
            victim = next((s for s in reversed(self._sequences.running) if s.sequence_id not in planned), sequence)
            self._lifecycle.preempt(victim)
            if victim is sequence:
                return False
        return True


def _has_failed(sequence: EngineSequence) -> bool:
    return sequence.status is Status.FINISHED
