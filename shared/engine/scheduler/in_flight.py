"""Steps that were planned and whose results are not known yet. Pure policy, part of the scheduler."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.engine.plan import BlockCopy, PlannedSequence, SampleSpec, StepPlan
from shared.engine.sequence import EngineSequence
from shared.structure.structured_output import STRUCTURE_MEMORY_PLANS

MAX_IN_FLIGHT = 2
"""One step that runs, one behind it."""


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    sequences: tuple[EngineSequence, ...]  # as in the plan: an id may be given anew meanwhile
    rows: dict[str, int]  # sequence id -> index among the step's sampled tokens


class StepsInFlight:
    """Counts on each sequence what the steps in flight will compute and produce for it."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._num_plans = 0  # since start, those in flight included

    def __len__(self) -> int:
        """Steps planned and not completed."""
        return len(self._steps)

    def begin(
        self, items: Sequence[PlannedSequence], sequences: Sequence[EngineSequence], copies: tuple[BlockCopy, ...] = ()
    ) -> StepPlan:
        """A step of these shares, `sequences[i]` that of `items[i]`, behind these copies; with nothing to do, an empty
        plan that does not fly."""
        plan = StepPlan(tuple(items), copies)
        if plan.is_empty:
            return plan
        assert len(self) < MAX_IN_FLIGHT
        self._num_plans += 1
        for item, sequence in zip(items, sequences, strict=True):
            sequence.num_in_flight_tokens += len(item.token_ids)
            if item.sample is not None:
                sequence.num_in_flight_samples += 1
                sequence.sampled_in_plan = self._num_plans
        sampling = [item.sequence_id for item in items if item.sample is not None]
        self._steps.append(_Step(plan, tuple(sequences), {name: row for row, name in enumerate(sampling)}))
        return plan

    def complete(self, plan: StepPlan) -> tuple[EngineSequence, ...]:
        """The sequences of the oldest step, which `plan` must be, as they were when it was planned."""
        step = self._steps.popleft()
        assert step.plan is plan, "steps are applied in the order in which they were planned"
        for item, sequence in zip(plan.sequences, step.sequences, strict=True):
            sequence.num_in_flight_tokens -= len(item.token_ids)
            sequence.num_in_flight_samples -= item.sample is not None
        return step.sequences

    def share(self, sequence: EngineSequence, count: int) -> PlannedSequence:
        """The next `count` tokens of a sequence, the one that a step in flight will add for it included."""
        start = sequence.num_computed_tokens + sequence.num_in_flight_tokens
        is_pending = sequence.num_in_flight_samples > 0
        assert not is_pending or count == 1
        return PlannedSequence(
            sequence.sequence_id,
            (0,) if is_pending else tuple(sequence.token_ids[start : start + count]),
            start,
            sequence.table(),
            sequence.num_prompt_tokens,
            self._sample_spec(sequence) if count == sequence.num_unplanned_tokens else None,
            self._steps[-1].rows[sequence.sequence_id] if is_pending else None,
            *sequence.targets(start, count),
        )

    def _sample_spec(self, sequence: EngineSequence) -> SampleSpec:
        position = len(sequence.token_ids) + sequence.num_in_flight_samples
        banned = sequence.banned_token_ids()
        prompt: tuple[int, ...] = ()
        output: tuple[int, ...] = ()
        if sequence.has_penalties:
            prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
        is_forgotten = self._num_plans + 1 - sequence.sampled_in_plan > STRUCTURE_MEMORY_PLANS
        never_sampled = sequence.sampled_in_plan == 0
        is_structured = sequence.sampling.structured_output is not None
        if sequence.has_penalties or (is_structured and (is_forgotten or never_sampled)):
            output = tuple(sequence.token_ids[sequence.num_prompt_tokens :])
        return SampleSpec(sequence.sampling, position, prompt, output, banned)


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
