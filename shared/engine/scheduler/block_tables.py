"""Block tables of sequences over the pool: growing, sealing, shipping, moving to host memory, freeing.

Pure policy, part of the scheduler. A copy to or from host memory belongs to the plan of the step before which it must
be done, and copies run in the order in which they were decided. So a freed block, or a freed slot, may be given away at
once; the runner copies the bytes.
"""

from __future__ import annotations

from shared.engine.plan import BlockCopy
from shared.engine.sequence import EngineSequence
from shared.kv.hashing import extend_chain
from shared.kv.pool import BlockPool, OutgoingBlock, OutOfBlocks


class BlockTables:
    """Operations on sequences' block tables; stateless."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def hashes(self, sequence: EngineSequence) -> list[bytes]:
        """Hashes of a sequence's full blocks."""
        extend_chain(sequence.block_hashes, sequence.hash_root, sequence.token_ids, self._pool.block_size)
        return sequence.block_hashes

    def take_found(self, sequence: EngineSequence) -> int:
        """Takes prompt blocks that others have sealed meanwhile, directly behind the computed ones; returns how many
        tokens they hold. 0 while a step that computes for the sequence is in flight."""
        block_size = self._pool.block_size
        start = len(sequence.block_ids)
        if sequence.num_in_flight_tokens or sequence.num_computed_tokens != start * block_size:
            return 0
        found = self._pool.match(self.hashes(sequence)[start : (sequence.num_prompt_tokens - 1) // block_size])
        self._pool.acquire(found)
        sequence.block_ids += found
        return len(found) * block_size

    def tokens_before_found(self, sequence: EngineSequence, max_tokens: int) -> int:
        """Tokens to compute before the first block of the prompt that lies in the pool already; at least 1, and all
        where none does. Looks no further than `max_tokens`."""
        block_size = self._pool.block_size
        start = sequence.num_planned_tokens
        end = min(start + max_tokens, sequence.num_prompt_tokens - 1)
        for index in range(start // block_size + 1, end // block_size):
            if self._pool.match([sequence.block_hashes[index]]):
                return index * block_size - start
        return sequence.num_tokens

    def grow(self, sequence: EngineSequence, count: int) -> bool:
        """Blocks for `count` more computed tokens; False where the pool has too few."""
        num_tokens = sequence.num_computed_tokens + sequence.num_in_flight_tokens + count
        missing = -(-num_tokens // self._pool.block_size) - len(sequence.block_ids)
        if missing <= 0:
            return True
        try:
            sequence.block_ids += self._pool.allocate(missing)
        except OutOfBlocks:
            return False
        return True

    def seal(self, sequence: EngineSequence, start: int) -> None:
        """Seals the full blocks from the one that holds token `start` on, those that are not yet."""
        block_size = self._pool.block_size
        first, end = start // block_size, sequence.num_computed_tokens // block_size
        if first == end:
            return  # as in most decode steps
        hashes = self.hashes(sequence)
        for index in range(first, end):
            if self._pool.hash_of(sequence.block_ids[index]) is None:
                self._pool.seal(sequence.block_ids[index], hashes[index])

    def ship(self, sequence: EngineSequence, end_block: int) -> list[OutgoingBlock]:
        """The blocks below `end_block` that are due; each holds a reference of its own for the sender."""
        if not sequence.ship_blocks:
            return []
        block_ids, checksum_of = sequence.block_ids, self._pool.checksum_of
        due = [
            OutgoingBlock(
                sequence.sequence_id, index, block_ids[index], checksum_of(block_ids[index]), sequence.receiver
            )
            for index in range(sequence.num_shipped_blocks, end_block)
            if index in sequence.ship_blocks
        ]
        sequence.num_shipped_blocks = max(sequence.num_shipped_blocks, end_block)
        self._pool.acquire([block.block_id for block in due])
        return due

    def free(self, sequence: EngineSequence) -> None:
        """Gives the sequence's references back."""
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.block_table = ()


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
