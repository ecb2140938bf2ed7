"""Block tables: which blocks each sequence holds. Pure policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shared.engine.sequence import EngineSequence
from shared.kv.groups import NO_BLOCK, KVGroups
from shared.kv.hashing import extend_chain
from shared.kv.pool import BlockPool, OutgoingBlock, OutOfBlocks

WANTED = -2
"""In a table: a block must be allocated here."""


class BlockTables:
    """Operations on sequences' block tables, of models whose layers all keep everything; stateless."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._places = 1  # of a table, for each block of tokens

    def hashes(self, sequence: EngineSequence) -> list[bytes]:
        """Hashes of a sequence's full blocks."""
        extend_chain(sequence.block_hashes, sequence.hash_root, sequence.token_ids, self._pool.block_size)
        return sequence.block_hashes

    def num_needed(self, sequence: EngineSequence) -> int:
        """Blocks that a sequence holds at most until its tokens are computed."""
        return -(-sequence.num_tokens // self._pool.block_size)

    def cached(self, sequence: EngineSequence, num_tokens: int) -> list[int]:
        """The places of its table, filled from the pool, for the longest prefix of its first `num_tokens` that it can
        continue behind. Changes nothing: see `BlockPool.match`."""
        return self._pool.match(self.hashes(sequence)[: num_tokens // self._pool.block_size])

    def before_arrival(self, sequence: EngineSequence) -> list[int]:
        """The table of a sequence whose KV will arrive, for its tokens and one more: blocks of the pool, WANTED where
        there is none yet, NO_BLOCK where none is needed. Changes nothing."""
        cached = self.cached(sequence, sequence.num_tokens)
        num_blocks = -(-(sequence.num_tokens + 1) // self._pool.block_size)
        return cached + [WANTED] * (num_blocks - len(cached))

    def arriving(self, sequence: EngineSequence) -> None:
        """Called once `before_arrival` is the sequence's table; nothing to do here."""

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
        """Tokens to compute before the first block of the prompt that lies in the pool already; all where none does,
        and 0 where the next one does, which `take_found` takes once the step in flight has ended. Looks no further than
        `max_tokens`."""
        block_size = self._pool.block_size
        start = sequence.num_planned_tokens
        end = min(start + max_tokens, sequence.num_prompt_tokens - 1)
        for index in range(self._first_to_find(sequence), end // block_size):
            if self._pool.find(sequence.block_hashes[index]) is not None:
                return index * block_size - start
        return sequence.num_tokens

    def _first_to_find(self, sequence: EngineSequence) -> int:
        """The first block behind the planned tokens that could be taken from the pool; behind all where the sequence
        has blocks for more than these tokens already. What is there without a step in flight was looked for."""
        block_size, start = self._pool.block_size, sequence.num_planned_tokens
        first = -(-start // block_size)
        if len(sequence.block_ids) > first * self._places:
            return sequence.num_tokens
        return first if sequence.num_in_flight_tokens else start // block_size + 1

    def grow(self, sequence: EngineSequence, count: int) -> bool:
        """Blocks for `count` more computed tokens; False where the pool has too few."""
        num_tokens = sequence.num_computed_tokens + sequence.num_in_flight_tokens + count
        num_places = -(-num_tokens // self._pool.block_size)
        return num_places <= len(sequence.block_ids) or self._grow_to(sequence, num_places)

    def grow_ahead(self, sequence: EngineSequence, count: int) -> bool:
        """As `grow`, for tokens that may be guessed and computed or not."""
        return self.grow(sequence, count)

    def grow_for_guesses(self, sequence: EngineSequence, count: int) -> bool:
        """As `grow`, for the newest token, which has its blocks, and `count` guesses of those behind it."""
        return self.grow(sequence, 1 + count)

    def keep_guessed(self, sequence: EngineSequence, start: int) -> None:
        """A step with guesses from `start` on was taken up to `num_computed_tokens`: nothing to do here."""

    def _grow_to(self, sequence: EngineSequence, num_places: int) -> bool:
        missing = num_places - len(sequence.block_ids)
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
        self._seal_places(sequence, range(first, end))

    def _seal_places(self, sequence: EngineSequence, places: Iterable[int]) -> None:
        hashes = self.hashes(sequence)
        for index in places:
            if sequence.block_ids[index] != NO_BLOCK and self._pool.hash_of(sequence.block_ids[index]) is None:
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

    def give_back_unseen(self, sequence: EngineSequence) -> None:
        """Gives back blocks that no token from `num_computed_tokens` on sees: none here."""

    def worth_storing(self, sequence: EngineSequence, num_tokens: int) -> range | list[int]:
        """Places of the blocks of its first `num_tokens` by which another worker could continue, less those that came
        by a hand-off."""
        return range(sequence.num_arrived_blocks, num_tokens // self._pool.block_size)

    def free(self, sequence: EngineSequence, *, returns: bool = False) -> None:
        """Gives the sequence's references back; `returns`: it takes them again soon."""
        held = held_of(sequence.block_ids) if sequence.num_holes else sequence.block_ids
        self._pool.release(held, sequence.retain_s, sequence.session, sequence.next_turn_s, ends=not returns)
        sequence.block_ids = []
        sequence.block_table = ()


class GroupedTables(BlockTables):
    """`BlockTables` for models whose layers are in several KV groups, or see a window alone: a sequence holds the
    blocks that its next token sees."""

    def __init__(self, pool: BlockPool, groups: KVGroups, step_tokens: int) -> None:
        """`step_tokens`: the most that a step computes."""
        super().__init__(pool)
        self._places = groups.size
        self._groups = groups
        self._step_tokens = step_tokens

    def hashes(self, sequence: EngineSequence) -> list[bytes]:
        """See `BlockTables`: by place."""
        groups = self._groups
        extend_chain(
            sequence.block_hashes, sequence.hash_root, sequence.token_ids, groups.block_size, num_groups=groups.size
        )
        return sequence.block_hashes

    def num_needed(self, sequence: EngineSequence) -> int:
        """See `BlockTables`."""
        return self._groups.num_blocks(sequence.num_tokens, self._step_tokens)

    def cached(self, sequence: EngineSequence, num_tokens: int) -> list[int]:
        """See `BlockTables`."""
        hashes = self.hashes(sequence)
        found = self._groups.longest(self._has(hashes), num_tokens // self._groups.block_size)
        return self._table(hashes, 0, found)

    def before_arrival(self, sequence: EngineSequence) -> list[int]:
        """See `BlockTables`."""
        groups, hashes = self._groups, self.hashes(sequence)
        block_size, size = groups.block_size, groups.size
        table = [WANTED] * (size * -(-(sequence.num_tokens + 1) // block_size))
        num_full = sequence.num_tokens // block_size
        for group, window in enumerate(groups.windows):
            first = 0 if window is None else groups.first_seen(window, sequence.num_tokens)
            table[group : first * size : size] = [NO_BLOCK] * first
            for place in range(first * size + group, num_full * size, size):
                block_id = self._pool.find(hashes[place])
                if block_id is not None:
                    table[place] = block_id
                elif window is None:
                    break
        return table

    def arriving(self, sequence: EngineSequence) -> None:
        """See `BlockTables`."""
        self._give_back_before(sequence, sequence.num_tokens)

    def take_found(self, sequence: EngineSequence) -> int:
        """See `BlockTables`."""
        groups = self._groups
        start = len(sequence.block_ids) // groups.size
        if sequence.num_in_flight_tokens or sequence.num_computed_tokens != start * groups.block_size:
            return 0
        hashes = self.hashes(sequence)
        end = (sequence.num_prompt_tokens - 1) // groups.block_size
        found = groups.longest(self._has(hashes), end, start)
        if found == start:
            return 0
        table = self._table(hashes, start, found)
        self._pool.acquire(held_of(table))
        sequence.block_ids += table
        self._give_back_before(sequence, found * groups.block_size)
        return (found - start) * groups.block_size

    def tokens_before_found(self, sequence: EngineSequence, max_tokens: int) -> int:
        """See `BlockTables`."""
        groups, hashes = self._groups, sequence.block_hashes
        has, block_size = self._has(hashes), groups.block_size
        start = sequence.num_planned_tokens
        last = sequence.num_prompt_tokens - 1
        for block in range(self._first_to_find(sequence), min(start + max_tokens, last) // block_size):
            if has(block * groups.size):
                can_go_on = groups.longest(has, last // block_size, block) > block
                return block * block_size - start if can_go_on else sequence.num_tokens
        return sequence.num_tokens

    def grow(self, sequence: EngineSequence, count: int) -> bool:
        """See `BlockTables`."""
        num_tokens = sequence.num_planned_tokens + count
        num_places = self._groups.size * -(-num_tokens // self._groups.block_size)
        if not self._groups.num_states:
            return self._grow_to(sequence, num_places)
        start = sequence.num_planned_tokens
        return self._grow_with_states(sequence, num_places, self._groups.written_states(start, start + count))

    def grow_ahead(self, sequence: EngineSequence, count: int) -> bool:
        """See `BlockTables`: of states none, since what is written there is not known."""
        if not self._groups.num_states:
            return self.grow(sequence, count)
        num_tokens = sequence.num_planned_tokens + count
        return self._grow_with_states(sequence, self._groups.size * -(-num_tokens // self._groups.block_size), ())

    def grow_for_guesses(self, sequence: EngineSequence, count: int) -> bool:
        """See `BlockTables`: of states one for each guess, in `guess_states`."""
        if not self.grow_ahead(sequence, 1 + count):
            return False
        try:
            sequence.guess_states = self._pool.allocate(count * self._groups.num_states)
        except OutOfBlocks:
            return False
        return True

    def keep_guessed(self, sequence: EngineSequence, start: int) -> None:
        """See `BlockTables`: of the states behind guesses those from which the sequence, or others, may continue take
        their places in its table; the others are given back."""
        groups, states, block_ids = self._groups, sequence.guess_states, sequence.block_ids
        if not states:
            return
        end, count = sequence.num_computed_tokens, groups.num_states
        for block in groups.written_states(start, end):
            guess = min((block + 1) * groups.block_size, end) - 2 - start
            if guess < 0:
                continue  # behind the step's first token it was written where it belongs
            behind = (block + 1) * groups.size
            of_guess, places = slice(guess * count, (guess + 1) * count), slice(behind - count, behind)
            before = block_ids[places]
            block_ids[places], states[of_guess] = states[of_guess], before
            sequence.num_holes -= before.count(NO_BLOCK)
        sequence.block_table = ()
        sequence.guess_states = []
        self._pool.release(held_of(states))

    def _grow_with_states(self, sequence: EngineSequence, num_places: int, written: Iterable[int]) -> bool:
        """As `grow`, and takes of states only the blocks that are written to."""
        groups, block_ids = self._groups, sequence.block_ids
        size, num_held = groups.size, len(block_ids)
        wanted = [place for place in range(num_held, num_places) if not groups.is_state(place % size)]
        for block in written:
            states = range(block * size + size - groups.num_states, (block + 1) * size)
            wanted += [place for place in states if place >= num_held or block_ids[place] == NO_BLOCK]
        if not wanted:
            return True
        try:
            fresh = self._pool.allocate(len(wanted))
        except OutOfBlocks:
            return False
        block_ids += [NO_BLOCK] * (num_places - num_held)
        for place, block_id in zip(wanted, fresh, strict=True):
            block_ids[place] = block_id
        sequence.num_holes += max(0, num_places - num_held) - len(wanted)
        sequence.block_table = ()
        return True

    def seal(self, sequence: EngineSequence, start: int) -> None:
        """See `BlockTables`."""
        block_size, size = self._groups.block_size, self._groups.size
        first, end = start // block_size, sequence.num_computed_tokens // block_size
        if first == end:
            return
        places: Iterable[int] = range(first * size, end * size)
        if self._groups.num_states:
            written = self._groups.written_states(start, sequence.num_computed_tokens)
            places = [place for place in places if not self._groups.is_state(place % size) or place // size in written]
        self._seal_places(sequence, places)

    def ship(self, sequence: EngineSequence, end_block: int) -> list[OutgoingBlock]:
        """See `BlockTables`."""
        return super().ship(sequence, end_block * self._groups.size)

    def give_back_unseen(self, sequence: EngineSequence) -> None:
        """See `BlockTables`. A step in flight begins at `num_computed_tokens`, and so reads none of them."""
        self._give_back_before(sequence, sequence.num_computed_tokens)

    def worth_storing(self, sequence: EngineSequence, num_tokens: int) -> range | list[int]:
        """See `BlockTables`. Of windows, what the token behind them sees, from wherever it came."""
        groups = self._groups
        seen = groups.seen_behind(num_tokens // groups.block_size)
        arrived = sequence.num_arrived_blocks
        return [place for place in seen if place >= arrived or groups.windows[place % groups.size] is not None]

    def free(self, sequence: EngineSequence, *, returns: bool = False) -> None:
        """See `BlockTables`."""
        self._pool.release(sequence.guess_states)
        sequence.guess_states = []
        super().free(sequence, returns=returns)
        sequence.seen_from = []
        sequence.num_holes = 0

    def _has(self, hashes: Sequence[bytes]) -> Callable[[int], bool]:
        find = self._pool.find
        return lambda place: find(hashes[place]) is not None

    def _table(self, hashes: Sequence[bytes], start: int, end: int) -> list[int]:
        """Places of the blocks `start` … `end` - 1, of which what the token behind them sees is in the pool."""
        table = [NO_BLOCK] * ((end - start) * self._groups.size)
        for place in self._groups.seen_behind(end, start):
            block_id = self._pool.find(hashes[place])
            assert block_id is not None, "a block that was just found"
            table[place - start * self._groups.size] = block_id
        return table

    def _give_back_before(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Gives back what the token behind the first `num_tokens` does not see."""
        groups, block_ids, unseen, is_changed = self._groups, sequence.block_ids, list[int](), False
        size = groups.size
        seen_from = sequence.seen_from = sequence.seen_from or [0] * size
        for group, window in groups.windowed:
            before, first = seen_from[group], groups.first_seen(window, num_tokens)
            if first > before:
                unseen += held_of(block_ids[before * size + group : first * size : size])
                block_ids[before * size + group : first * size : size] = [NO_BLOCK] * (first - before)
                seen_from[group] = first
                is_changed = True
        if is_changed:
            # Of states there may be holes that a step in flight has left between the blocks that it writes.
            states = range(size - groups.num_states, size)
            between = sum(block_ids[seen_from[group] * size + group :: size].count(NO_BLOCK) for group in states)
            sequence.num_holes = sum(seen_from) + between
            sequence.block_table = ()
            self._pool.release(unseen)


def block_tables(pool: BlockPool, groups: KVGroups, step_tokens: int) -> BlockTables:
    """The kind that serves these groups; `step_tokens`: the most that a step computes."""
    return BlockTables(pool) if groups.is_plain else GroupedTables(pool, groups, step_tokens)


def held_of(block_ids: Iterable[int]) -> list[int]:
    """The entries of a table, or of slots, that are blocks."""
    return [block_id for block_id in block_ids if block_id >= 0]
