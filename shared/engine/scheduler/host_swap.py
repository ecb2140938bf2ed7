"""What host memory holds of sequences that lost their blocks. Pure policy.

A copy to or from host memory belongs to the plan of the step before which it must be done, and copies run in the order
in which they were decided. So a freed block, or a freed slot, may be given away at once; the runner copies the bytes.
"""

from __future__ import annotations

from collections.abc import Collection

from shared.engine.plan import BlockCopy
from shared.engine.scheduler.block_tables import held_of
from shared.engine.sequence import EngineSequence
from shared.kv.groups import NO_BLOCK
from shared.kv.pool import BlockPool, OutOfBlocks


class HostSwap:
    """Slots of one block each. A sequence is moved out whole or not at all: it is then recomputed."""

    def __init__(self, pool: BlockPool, num_slots: int, num_groups: int) -> None:
        """`num_slots` 0: nothing is ever moved out. `num_groups`: of KV."""
        self._pool = pool
        self._num_groups = num_groups
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
        # It may hold blocks not written to yet.
        written = sequence.block_ids[: -(-sequence.num_computed_tokens // self._pool.block_size) * self._num_groups]
        num_blocks = len(held_of(written))
        if num_blocks == 0 or num_blocks > len(self._free):
            return False
        sequence.host_slots = [NO_BLOCK if block_id == NO_BLOCK else self._free.pop() for block_id in written]
        sequence.num_host_tokens = sequence.num_computed_tokens
        pairs = zip(written, sequence.host_slots, strict=True)
        self._copies += [BlockCopy(block_id, slot, to_host=True) for block_id, slot in pairs if slot != NO_BLOCK]
        return True

    def move_in(self, sequence: EngineSequence) -> int:
        """Brings a sequence's KV back behind the prefix that `block_ids` holds, into blocks that it allocates; the
        slots are free then. Returns how many of its tokens are computed. Where the pool has too few blocks, as windows
        may need what is behind the prefix and behind what was moved out at once, these are the prefix's alone.
        """
        held = len(sequence.block_ids)
        computed = max(held // self._num_groups * self._pool.block_size, sequence.num_host_tokens)
        slots = sequence.host_slots[held:]
        if slots:
            try:
                fresh = iter(self._pool.allocate(len(held_of(slots))))
            except OutOfBlocks:
                self.drop(sequence)
                return held // self._num_groups * self._pool.block_size
            block_ids = [NO_BLOCK if slot == NO_BLOCK else next(fresh) for slot in slots]
            sequence.block_ids += block_ids
            pairs = zip(block_ids, slots, strict=True)
            self._copies += [BlockCopy(block_id, slot, to_host=False) for block_id, slot in pairs if slot != NO_BLOCK]
        self.drop(sequence)
        return computed

    def drop(self, sequence: EngineSequence) -> None:
        """Frees a sequence's slots, if it has any."""
        self._free += reversed(held_of(sequence.host_slots))
        sequence.host_slots = []
        sequence.num_host_tokens = 0

    def clone(self, source_id: int, block_id: int) -> None:
        """Plans a copy within the pool; both blocks are in use until the next step has begun."""
        self._copies.append(BlockCopy(block_id, NO_BLOCK, to_host=False, source_id=source_id))

    def drop_clones(self, block_ids: Collection[int]) -> None:
        """Takes back the copies within the pool to these blocks that no step has taken, before they are freed."""
        self._copies = [c for c in self._copies if c.source_id is None or c.block_id not in block_ids]

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies decided since the last call, for the step that is planned now."""
        copies, self._copies = tuple(self._copies), []
        return copies
