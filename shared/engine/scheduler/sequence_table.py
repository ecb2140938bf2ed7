"""A scheduler's live sequences by status: waiting, running, or receiving their KV from elsewhere."""

from __future__ import annotations

from collections import deque

from shared.engine.sequence import EngineSequence, Goal, Status
from shared.sizing.step_time import StepWork, chunk_pairs


class SequenceTable:
    """A sequence is in exactly one of the three by its status; the moves between them are the methods here."""

    def __init__(self) -> None:
        self.waiting: deque[EngineSequence] = deque()
        """In order of arrival, preempted ones in front."""
        self.running: list[EngineSequence] = []
        """In order of arrival."""
        self.receiving: dict[str, EngineSequence] = {}
        self._by_id: dict[str, EngineSequence] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, sequence_id: str) -> EngineSequence:
        return self._by_id[sequence_id]

    def get(self, sequence_id: str) -> EngineSequence | None:
        """None where it is unknown, or ended."""
        return self._by_id.get(sequence_id)

    @property
    def holders(self) -> tuple[EngineSequence, ...]:
        """Those that hold blocks."""
        return (*self.running, *self.receiving.values())

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        waiting = sum(s.num_uncomputed_tokens - s.num_host_tokens for s in self.waiting)
        running = [len(s.token_ids) - s.num_computed_tokens for s in self.running]
        return waiting + sum(count for count in running if count > 1)

    @property
    def num_queued_pairs(self) -> int:
        """Pairs of query and key in the attention of prompt tokens that are not computed yet."""
        found = 0
        for sequence in (*self.waiting, *self.running):
            before = sequence.num_computed_tokens + sequence.num_host_tokens
            count = len(sequence.token_ids) - before
            if count > 1:
                found += chunk_pairs(count, before)
        return found

    @property
    def decoding(self) -> StepWork:
        """A token of each running sequence whose prompt is computed."""
        lengths = [len(s.token_ids) for s in self.running if len(s.token_ids) - s.num_computed_tokens == 1]
        return StepWork(len(lengths), sum(lengths))

    @property
    def promised(self) -> StepWork:
        """A token of each sequence that will be answered here and does not decode yet: its prompt is not computed, or
        has not arrived."""
        lengths = [
            len(s.token_ids)
            for s in self._by_id.values()
            if s.goal is Goal.COMPLETION
            and not (s.status is Status.RUNNING and len(s.token_ids) - s.num_computed_tokens == 1)
        ]
        return StepWork(len(lengths), sum(lengths))

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
        """A waiting or receiving one runs. It takes its place by arrival: blocks do not arrive in the order of their
        reservation."""
        if sequence.status is Status.RECEIVING:
            del self.receiving[sequence.sequence_id]
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        place = len(self.running)
        while place > 0 and self.running[place - 1].arrival > sequence.arrival:
            place -= 1
        self.running.insert(place, sequence)

    def preempt(self, sequence: EngineSequence) -> None:
        """A running one waits again, before all others."""
        self.running.remove(sequence)
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def end(self, sequence: EngineSequence) -> None:
        """Any of them leaves for good."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        else:
            del self.receiving[sequence.sequence_id]
        sequence.status = Status.FINISHED
        del self._by_id[sequence.sequence_id]

    def check(self, block_size: int) -> None:
        """Asserts that each is where its status says, and holds blocks only where it may."""
        for sequence in self._by_id.values():
            sequence.check()
            held = sequence.status in (Status.RUNNING, Status.RECEIVING)
            assert held or not sequence.block_ids, f"{sequence.sequence_id} waits but holds blocks"
            assert not held or not sequence.host_slots, f"{sequence.sequence_id} holds blocks in both memories"
            if held:
                capacity = len(sequence.block_ids) * block_size
                assert sequence.num_computed_tokens <= capacity, f"{sequence.sequence_id}: computed beyond its blocks"
        assert all(s.status is Status.WAITING for s in self.waiting), "all in waiting wait"
        assert all(s.status is Status.RUNNING for s in self.running), "all in running run"
        assert all(s.status is Status.RECEIVING for s in self.receiving.values()), "all in receiving receive"
        assert [s.arrival for s in self.running] == sorted(s.arrival for s in self.running)
        assert len(self) == len(self.running) + len(self.receiving) + len(self.waiting)

    @property
    def host_slots(self) -> list[int]:
        """Slots of host memory that they hold, all together."""
        return [slot for sequence in self._by_id.values() for slot in sequence.host_slots]
