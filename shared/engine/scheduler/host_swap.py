"""Preempted sequences' blocks in host memory: which slot holds which. Pure policy; the runner copies the bytes.

A copy belongs to the plan of the step before which it must be done, and copies run in the order in which they were
decided. So a freed block, or a freed slot, may be given away at once.
"""

from __future__ import annotations

from shared.engine.plan import BlockCopy
from shared.engine.sequence import EngineSequence
from shared.kv.pool import BlockPool


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
