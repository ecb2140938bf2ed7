"""A pool's memory and the host's as a runner would write them, to see that every step reads what it should."""

from __future__ import annotations

from shared.engine.plan import PlannedSequence, StepPlan
from shared.engine.sequence import EngineSequence
from shared.kv.groups import KVGroups

GARBAGE = None


class BlockMemory:
    """Each position of a block holds (the sequence it was computed for, its position, the KV group, the token), or
    garbage: KV is a function of all tokens up to the position. A token is None where it was not known when the step
    began. A block of states holds in all its places what a state behind its last position is."""

    def __init__(self, num_blocks: int, num_slots: int, groups: KVGroups):
        block_size = self.block_size = groups.block_size
        self.groups = groups
        self.windows = groups.windows
        self.blocks = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.slots = [[GARBAGE] * block_size for _ in range(num_slots)]

    def launch(self, plan: StepPlan, sequences: dict[str, EngineSequence]) -> None:
        """Does a step's copies and writes, and asserts that all that it reads is the sequence's own."""
        for copy in plan.copies:
            if copy.to_host:
                self.slots[copy.host_slot] = list(self.blocks[copy.block_id])
            else:
                self.blocks[copy.block_id] = list(self.slots[copy.host_slot])
        for item in plan.sequences:
            self._move_states(item, sequences[item.sequence_id])
        for item in plan.sequences:
            for position in range(item.start, item.end):
                for group in range(len(self.windows) - self.groups.num_states):
                    block = self._block(item.block_ids, position, group)
                    token_id = None if item.pending is not None else item.token_ids[position - item.start]
                    block[position % self.block_size] = (sequences[item.sequence_id], position, group, token_id)
        for item in plan.sequences:
            for group, window in enumerate(self.windows):
                if self.groups.is_state(group):
                    continue
                first = 0 if window is None else max(0, item.start - window + 1)
                self.check(sequences[item.sequence_id], item.block_ids, group, first, item.end, item.start)

    def _move_states(self, item: PlannedSequence, sequence: EngineSequence) -> None:
        """Reads the state behind the token before a step's first one, and writes those that the step is to write."""
        if item.guesses and self.groups.num_states:
            self._guess_states(item, sequence)
            return
        for group in filter(self.groups.is_state, range(self.groups.size)):
            if item.start:
                self.check(sequence, item.block_ids, group, item.start - 1, item.start, item.start)
            for block in self.groups.written_states(item.start, item.end):
                position = min((block + 1) * self.block_size, item.end) - 1
                token_id = None if item.pending is not None else item.token_ids[position - item.start]
                state = [(sequence, position, group, token_id)] * self.block_size
                block_id = item.block_ids[block * self.groups.size + group]
                assert block_id >= 0, f"{item.sequence_id} writes a state to no block"
                self.blocks[block_id] = state

    def _guess_states(self, item: PlannedSequence, sequence: EngineSequence) -> None:
        """Likewise, where each token has a state of its own."""
        tokens = self.groups.guess_state_blocks(item.block_ids, item.start, item.guess_states)
        assert len(tokens) == len(item.token_ids)
        for place, group in enumerate(filter(self.groups.is_state, range(self.groups.size))):
            if item.start:
                self.check(sequence, item.block_ids, group, item.start - 1, item.start, item.start)
            for position, (before, _, own) in enumerate(tokens, item.start):
                if position > item.start:
                    assert self.blocks[before[place]][0][:3] == (sequence, position - 1, group)
                assert own[place] >= 0, f"{item.sequence_id} writes a state to no block"
                token_id = item.token_ids[position - item.start]
                self.blocks[own[place]] = [(sequence, position, group, token_id)] * self.block_size

    def check(self, reader: EngineSequence, block_ids, group: int, first: int, num_tokens: int, num_computed: int):
        """The tokens `first` … `num_tokens` - 1 of a block table are the reader's, those before `num_computed` ones
        that it has."""
        compared = {}
        for position in range(first, num_tokens):
            found = self._block(block_ids, position, group)[position % self.block_size]
            assert found is not GARBAGE, f"{reader.sequence_id} reads garbage at {position}"
            writer, written_at, of_group, token_id = found
            if token_id is not None and position < num_computed:
                assert token_id == reader.token_ids[position], f"{reader.sequence_id} reads a wrong guess at {position}"
            assert written_at == position, f"{reader.sequence_id} reads another position's KV at {position}"
            assert of_group == group, f"{reader.sequence_id} reads another group's KV at {position}"
            if writer is not reader:
                compared[writer.sequence_id] = writer, position
        for writer, position in compared.values():
            known = min(position + 1, len(writer.token_ids), len(reader.token_ids))
            assert writer.token_ids[:known] == reader.token_ids[:known], f"{reader.sequence_id} reads another's KV"

    def receive(self, sequence: EngineSequence, indexes, *, whole: bool) -> None:
        """Blocks arrive, or bytes of them: until they are all there, they mean nothing."""
        for place in indexes:
            index, group = divmod(place, len(self.windows))
            first = index * self.block_size
            last = min(first + self.block_size, sequence.num_tokens) - 1
            self.blocks[sequence.block_ids[place]] = [
                (sequence, last if self.groups.is_state(group) else first + offset, group, None) if whole else GARBAGE
                for offset in range(self.block_size)
            ]

    def _block(self, block_ids, position: int, group: int) -> list:
        return self.blocks[block_ids[position // self.block_size * len(self.windows) + group]]
