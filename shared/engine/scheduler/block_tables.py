"""Block tables of sequences over the pool: growing, sealing, shipping, freeing. Pure policy, part of the scheduler."""

from __future__ import annotations

from shared.engine.sequence import EngineSequence
from shared.kv.handoff.outgoing_block import OutgoingBlock
from shared.kv.hashing import extend_chain
from shared.kv.pool import BlockPool, OutOfBlocks


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
