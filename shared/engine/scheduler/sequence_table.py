"""A scheduler's live sequences: where each is, which prompt is next, and what the steps in flight compute of them.

Pure policy, part of the scheduler.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.engine.plan import BlockCopy, PlannedSequence, SampleSpec, StepPlan
from shared.engine.sequence import EngineSequence, Status
from shared.sizing.step_time import StepWork, chunk_pairs
from shared.structure.structured_output import STRUCTURE_MEMORY_PLANS

MAX_IN_FLIGHT = 2
"""One step that runs, one behind it."""


class OpenWork(NamedTuple):
    """What is to be computed of a scheduler's live sequences."""

    num_queued_tokens: int
    """Prompt tokens: less the prefixes that waiting ones have in the pool."""
    num_queued_pairs: int
    """Pairs of query and key in the attention of those tokens."""
    decoding: StepWork
    """A token of each running sequence whose prompt is computed."""
    promised: StepWork
    """A token of each sequence that will be answered here and does not decode yet: its prompt is not computed, or has
    not arrived."""


class SequenceTable:
    """A sequence is in exactly one of the three by its status; the moves between them are the methods here."""

    def __init__(self) -> None:
        self.waiting: deque[EngineSequence] = deque()
        """Waiting sequences in order of arrival, preempted ones in front."""
        self.running: list[EngineSequence] = []
        """Running sequences by `rank`: by priority, then in order of arrival."""
        self.receiving: dict[str, EngineSequence] = {}
        self._by_id: dict[str, EngineSequence] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, sequence_id: str) -> EngineSequence:
        return self._by_id[sequence_id]

    def of(self, sequence_ids: Iterable[str]) -> list[EngineSequence]:
        """Live ones, in this order."""
        by_id = self._by_id
        return [by_id[sequence_id] for sequence_id in sequence_ids]

    def get(self, sequence_id: str) -> EngineSequence | None:
        """None where it is unknown, or ended."""
        return self._by_id.get(sequence_id)

    @property
    def holders(self) -> tuple[EngineSequence, ...]:
        """The sequences that hold blocks."""
        return (*self.running, *self.receiving.values())

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks, those still receiving included."""
        return len(self.running) + len(self.receiving)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be computed."""
        return len(self.waiting)

    @property
    def work(self) -> OpenWork:
        """What is to be computed of all of them."""
        lengths: list[int] = []
        open_prompts: list[EngineSequence] = []
        for sequence in self.running:
            num_tokens = len(sequence.token_ids)
            if num_tokens - sequence.num_computed_tokens == 1:
                lengths.append(num_tokens)
            else:
                open_prompts.append(sequence)
        num_tokens = sum(s.num_missing_tokens for s in self.waiting) + sum(
            s.num_uncomputed_tokens for s in open_prompts
        )
        open_prompts += self.waiting
        missing = [(s.num_missing_tokens, s.num_tokens) for s in open_prompts]
        num_pairs = sum(chunk_pairs(count, num_all - count) for count, num_all in missing if count > 1)
        promised = [s.num_tokens for s in (*open_prompts, *self.receiving.values()) if not s.ends_with_first_token]
        return OpenWork(
            num_tokens, num_pairs, StepWork(len(lengths), sum(lengths)), StepWork(len(promised), sum(promised))
        )

    # --- moves

    def add(self, sequence: EngineSequence, now_s: float, *, receiving: bool = False) -> None:
        """A new sequence, which waits to be computed here or for its KV."""
        assert sequence.sequence_id not in self._by_id, f"{sequence.sequence_id} is known already"
        self._num_arrived += 1
        sequence.arrival, sequence.arrived_s = self._num_arrived, now_s
        self._by_id[sequence.sequence_id] = sequence
        if receiving:
            sequence.status = Status.RECEIVING
            self.receiving[sequence.sequence_id] = sequence
        else:
            self.waiting.append(sequence)

    def run(self, sequence: EngineSequence) -> None:
        """A waiting or receiving one runs. It takes its place by rank: blocks do not arrive in the order of their
        reservation."""
        if sequence.status is Status.RECEIVING:
            del self.receiving[sequence.sequence_id]
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        place = len(self.running)
        while place > 0 and self.running[place - 1].rank > sequence.rank:
            place -= 1
        self.running.insert(place, sequence)

    def preempt(self, sequence: EngineSequence) -> None:
        """One that runs, or whose blocks did not arrive sound, waits again, before all others."""
        if sequence.status is Status.RECEIVING:
            del self.receiving[sequence.sequence_id]
        else:
            self.running.remove(sequence)
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def waits_first(self, sequence: EngineSequence) -> None:
        """A waiting one waits before all others."""
        self.waiting.remove(sequence)
        self.waiting.appendleft(sequence)

    def end(self, sequence: EngineSequence) -> None:
        """Removes a sequence that has ended."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        else:
            del self.receiving[sequence.sequence_id]
        sequence.status = Status.FINISHED
        del self._by_id[sequence.sequence_id]

    def check(self, block_size: int, num_groups: int = 1) -> None:
        """Asserts that each is where its status says, and holds blocks only where it may."""
        for sequence in self._by_id.values():
            sequence.check()
            held = sequence.status in (Status.RUNNING, Status.RECEIVING)
            assert held or not sequence.block_ids, f"{sequence.sequence_id} waits but holds blocks"
            assert not held or not sequence.host_slots, f"{sequence.sequence_id} holds blocks in both memories"
            if held:
                capacity = len(sequence.block_ids) // num_groups * block_size
                assert sequence.num_computed_tokens <= capacity, f"{sequence.sequence_id}: computed beyond its blocks"
        assert all(s.status is Status.WAITING for s in self.waiting), "all in waiting wait"
        assert all(s.status is Status.RUNNING for s in self.running), "all in running run"
        assert all(s.status is Status.RECEIVING for s in self.receiving.values()), "all in receiving receive"
        assert [s.rank for s in self.running] == sorted(s.rank for s in self.running)
        assert len(self) == len(self.running) + len(self.receiving) + len(self.waiting)

    @property
    def host_slots(self) -> list[int]:
        """Slots of host memory that they hold, all together."""
        return [slot for sequence in self._by_id.values() for slot in sequence.host_slots if slot >= 0]


class PromptOrder:
    """Shortest remaining first, but no prompt is overtaken later than `max_overtaken_s` after its arrival.

    Serving the shortest first gives the lowest mean time to first token, and would starve a long prompt under load.
    So those that have waited their time go before all that have not, in order of arrival; and before these go
    preempted sequences, whose clients already read tokens. All this among sequences of one priority: those that have
    more go first.
    """

    def __init__(self, max_overtaken_s: float) -> None:
        """Seconds; 0 = first come, first served."""
        self._max_overtaken_s = max_overtaken_s

    def sort(
        self, running: Sequence[EngineSequence], waiting: Sequence[EngineSequence], now_s: float
    ) -> list[EngineSequence]:
        """Both in one order: prompts that are partly computed, and those that wait, each given by arrival and
        preempted ones first."""
        if self._max_overtaken_s == 0:
            return sorted((*running, *waiting), key=lambda sequence: -sequence.priority)
        return sorted((*running, *waiting), key=lambda sequence: self._key(sequence, now_s))

    def _key(self, sequence: EngineSequence, now_s: float) -> tuple[int, int, int, int]:
        least = -sequence.priority
        if sequence.started and sequence.status is Status.WAITING:
            return (least, 0, sequence.arrival, 0)
        if now_s - sequence.arrived_s >= self._max_overtaken_s:
            return (least, 1, sequence.arrival, 0)
        return (least, 2, sequence.num_uncomputed_tokens, sequence.arrival)


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    sequences: tuple[EngineSequence, ...]  # as in the plan: an id may be given anew meanwhile


class StepsInFlight:
    """Counts on each sequence what the steps in flight will compute and produce for it."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._num_plans = 0  # since start, those in flight included

    def __len__(self) -> int:
        """Steps planned and not completed."""
        return len(self._steps)

    @property
    def has_guesses(self) -> bool:
        """Whether one of them has guesses: what follows them is not known yet."""
        return any(step.plan.num_guesses > 0 for step in self._steps)

    def begin(
        self,
        items: Sequence[PlannedSequence],
        sequences: Sequence[EngineSequence],
        copies: tuple[BlockCopy, ...] = (),
        *,
        begins_guesses: bool = False,
    ) -> StepPlan:
        """A step of these shares, `sequences[i]` that of `items[i]`, behind these copies; with nothing to do, an empty
        plan that does not fly."""
        plan = StepPlan(tuple(items), copies, begins_guesses)
        if plan.is_empty:
            return plan
        assert len(self) < MAX_IN_FLIGHT
        self._num_plans = number = self._num_plans + 1
        row = 0
        for item, sequence in zip(items, sequences, strict=True):
            sequence.num_in_flight_tokens += len(item.token_ids)
            if num_samples := len(item.samples):
                sequence.newest_row = row
                row += num_samples
                sequence.num_in_flight_samples += num_samples
                sequence.sampled_in_plan = number
        self._steps.append(_Step(plan, tuple(sequences)))
        return plan

    def complete(self, plan: StepPlan) -> tuple[EngineSequence, ...]:
        """The sequences of the oldest step, which `plan` must be, as they were when it was planned."""
        step = self._steps.popleft()
        assert step.plan is plan, "steps are applied in the order in which they were planned"
        for item, sequence in zip(plan.sequences, step.sequences, strict=True):
            sequence.num_in_flight_tokens -= len(item.token_ids)
            sequence.num_in_flight_samples -= len(item.samples)
        return step.sequences

    def share(self, sequence: EngineSequence, count: int) -> PlannedSequence:
        """The next `count` tokens of a sequence, the one that a step in flight will add for it included."""
        start = sequence.num_computed_tokens + sequence.num_in_flight_tokens
        is_pending = sequence.num_in_flight_samples > 0
        assert not is_pending or count == 1
        token_ids, sampling = sequence.token_ids, sequence.sampling
        is_sampled = start + count == len(token_ids) + sequence.num_in_flight_samples
        targets: tuple[int, ...] = ()
        num_alternatives = 0
        if sampling.prompt_logprobs is not None:
            targets, num_alternatives = sequence.targets(start, count)
        fields = (
            sequence.sequence_id,
            (0,) if is_pending else tuple(token_ids[start : start + count]),
            start,
            sequence.table(),
            sequence.num_prompt_tokens,
            (self._sample_spec(sequence),) if is_sampled else (),
            sequence.newest_row if is_pending else None,
            targets,
            num_alternatives,
            sequence.num_to_pool(start, count) if sampling.pooling else 0,
            sequence.adapter,
            0 if is_sampled else token_ids[start + count],
            (),
        )
        return tuple.__new__(PlannedSequence, fields)

    @staticmethod
    def with_guesses(item: PlannedSequence, sequence: EngineSequence, guesses: tuple[int, ...]) -> PlannedSequence:
        """The share of a sequence that decodes and has no other step in flight, with guesses of what comes behind its
        newest token."""
        first = item.samples[0]
        return item._replace(
            token_ids=item.token_ids + guesses,
            block_ids=sequence.table(),
            guess_states=tuple(sequence.guess_states),
            samples=(
                first,
                *(
                    SampleSpec(
                        first.params,
                        first.position + count,
                        banned_token_ids=sequence.banned_token_ids(count),
                    )
                    for count in range(1, len(guesses) + 1)
                ),
            ),
        )

    def _sample_spec(self, sequence: EngineSequence) -> SampleSpec:
        sampling = sequence.sampling
        position = len(sequence.token_ids) + sequence.num_in_flight_samples
        banned = sequence.banned_token_ids() if sampling.min_tokens else ()
        prompt: tuple[int, ...] = ()
        output: tuple[int, ...] = ()
        last = sequence.sampled_in_plan
        if last != self._num_plans or last == 0:  # what follows from its tokens may not be known
            is_new = sequence.has_penalties
            if is_new:
                prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
            is_forgotten = last == 0 or self._num_plans - last >= STRUCTURE_MEMORY_PLANS
            if is_new or (sampling.structured_output is not None and is_forgotten):
                output = tuple(sequence.token_ids[sequence.num_prompt_tokens :])
        return tuple.__new__(SampleSpec, (sampling, position, prompt, output, banned))


class UnsentBlocks:
    """Blocks handed to the shipper and not given back, by receiver.

    A receiver that takes nothing would otherwise fill the pool with its blocks, and no other would get a prompt done.
    """

    def __init__(self, most: int) -> None:
        """Beyond `most` blocks no further prompt is started for that receiver."""
        self._most = most
        self._num_blocks: Counter[bytes] = Counter()

    def add(self, receiver: bytes, num_blocks: int) -> None:
        """Blocks were handed over."""
        if num_blocks:
            self._num_blocks[receiver] += num_blocks

    def remove(self, receiver: bytes, num_blocks: int) -> None:
        """Blocks were sent or given up."""
        self._num_blocks[receiver] -= num_blocks
        assert self._num_blocks[receiver] >= 0, "more blocks came back than were handed over"
        if not self._num_blocks[receiver]:
            del self._num_blocks[receiver]

    def is_full(self, receiver: bytes) -> bool:
        """True while prompts for this receiver have to wait."""
        return self._num_blocks[receiver] > self._most

    @property
    def total(self) -> int:
        """Over all receivers."""
        return sum(self._num_blocks.values())
