"""Ownership of blocks, and the order in which cached blocks are evicted. Policy only: no tensors.

A block is in one of three states:

    used    num_refs ≥ 1; writable while num_refs == 1 and it is not sealed
    cached  num_refs == 0, sealed, findable by its hash; `acquire` revives it
    blank   num_refs == 0 and nothing worth keeping

Blank and cached blocks are in one free list: first the blank ones, then the cached ones from the least to the most
recently released. `allocate` takes from the head, so no cached block is lost while a blank one is left.

A cached block that is to be *retained* for a time after its last use is in another list instead: see
`shared/kv/retained.py`. `allocate` takes blank blocks, then those whose time has passed, then cached ones, and retained
ones last. Each session that wants a block retained is noted with it: where the last of them is closed, `allocate` takes
the block next after the blank ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shared.kv.free_lists import FreeLists
from shared.kv.next_turns import NextTurns
from shared.kv.retained import NO_SESSION, RETENTIONS_S, RetainedBlocks


@dataclass(frozen=True, slots=True)
class OutgoingBlock:
    """A block to send. The sender owns one reference on it, and gives it back when the memory may be reused."""

    sequence_id: str
    index: int  # in the sequence's block table, or in the list of hashes that was asked for
    block_id: int
    known_checksum: int | None  # None: not computed yet; the engine fills it in before a sender sees the block
    receiver: bytes = b""  # transfer address that it is for, where the pool counts unsent blocks by receiver

    @property
    def checksum(self) -> int:
        """The checksum, which must be known by now."""
        assert self.known_checksum is not None, f"block {self.block_id} has no checksum yet"
        return self.known_checksum


class OutOfBlocks(Exception):
    """`needed` blocks were requested, but only `free` are neither in use nor reserved."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"needed {needed} blocks, {free} are free")
        self.needed = needed
        self.free = free


@dataclass(frozen=True, slots=True)
class PoolEvents:
    """Hashes that became findable and that ceased to be since the last drain; changes undone in between cancel out.

    Applied in any order to the set of hashes held before, they give `cached_hashes()`.
    """

    sealed: list[bytes]
    evicted: list[bytes]


class BlockPool:
    """Reference counts, LRU free list and prefix cache over block ids `0 … num_blocks - 1`.

    Not thread-safe: one engine thread owns it. Misuse (releasing a free block, writing state of a sealed one)
    is a bug of the caller and raises ValueError before anything has changed.
    """

    def __init__(self, num_blocks: int, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, for what is retained."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, not {num_blocks} and {block_size}")
        self._num_blocks = num_blocks
        self.block_size: Final = block_size
        """Tokens a block."""
        self._num_refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks  # None: not sealed
        self._checksums: list[int | None] = [None] * num_blocks
        self._findable: dict[bytes, int] = {}  # hash -> the one block that match() returns for it
        self._lists = FreeLists(num_blocks)
        self._free = self._lists.new()  # blank blocks, then cached ones
        self._closed = self._lists.new()  # blocks of closed sessions
        self._retained = RetainedBlocks(self._lists)
        self._next_turns = NextTurns()
        for block_id in range(num_blocks):
            self._lists.append(self._free, block_id)
        self._clock = clock
        # Insertion-ordered sets of the changes since the last drain.
        self._newly_findable: dict[bytes, None] = {}
        self._newly_evicted: dict[bytes, None] = {}

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out: blank and cached ones."""
        return self._lists.num_linked

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self._num_blocks - self.num_free

    @property
    def num_retained(self) -> int:
        """Free blocks that are retained, also those whose time has passed."""
        return len(self._retained)

    @property
    def num_cached(self) -> int:
        """Blocks findable by hash, in use or not; equals `len(cached_hashes())`."""
        return len(self._findable)

    def find(self, block_hash: bytes) -> int | None:
        """The cached block of this hash, None where there is none. Changes nothing, like `match`."""
        return self._findable.get(block_hash)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Block ids of the longest cached prefix of `hashes`.

        Changes nothing: `acquire` the blocks before the next `allocate`, which could evict them.
        """
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._findable.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Take one more reference on each block; a cached block leaves the free list.

        Raises ValueError for a blank block, which holds no valid KV.
        """
        for block_id in block_ids:
            if self._num_refs[block_id] == 0 and not self._is_findable(block_id):
                raise ValueError(f"block {block_id} is free and holds no cached prefix")
        others = []
        for block_id in block_ids:
            if self._num_refs[block_id] == 0 and not self._retained.unlink(block_id):
                self._lists.unlink(block_id)
                others.append(block_id)
            self._num_refs[block_id] += 1
        self._retained.others_used(others)

    def allocate(self, num_blocks: int) -> list[int]:
        """`num_blocks` writable blocks with one reference each, or OutOfBlocks and no change.

        Blank blocks go first, then those of closed sessions, then retained ones whose time has passed, then cached
        ones, least recently released first, then retained ones, those used again last first as far as that is known;
        all but the blank ones lose their hash.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self.num_free:
            raise OutOfBlocks(num_blocks, self.num_free)
        block_ids = [self._take() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_refs[block_id] = 1
        return block_ids

    def release(
        self,
        block_ids: Sequence[int],
        retain_s: float = 0.0,
        session: str = NO_SESSION,
        next_turn_s: float | None = None,
        *,
        ends: bool = True,
    ) -> None:
        """Give back one reference on each block, in the order of a sequence's block table.

        With `retain_s`, findable ones are retained from now on whenever they are not in use, for the longest of
        RETENTIONS_S up to it, anew after each use, until every session that wanted so is closed; without `session`
        until their time has passed. `next_turn_s`: seconds until the session's next turn, for the order among retained
        blocks; None: not known, see `NextTurns`. `ends`: False where the session's turn continues, and takes them
        again.

        Findable blocks join the free list's tail, the last block of the sequence first: so later blocks are evicted
        before earlier ones, and the rest of a prefix is still a prefix. Blocks that no lookup can find (not sealed, or
        duplicates) join its head. Raises ValueError on a double release and changes nothing.
        """
        for block_id, count in Counter(block_ids).items():
            if count > self._num_refs[block_id]:
                raise ValueError(f"block {block_id} released {count} times with {self._num_refs[block_id]} references")
        retention = max((place for place, at_least in enumerate(RETENTIONS_S) if retain_s >= at_least), default=-1)
        now = 0.0 if retention < 0 and self._retained.is_unused else self._clock()
        if retention >= 0:
            for block_id in reversed(block_ids):
                if self._is_findable(block_id):
                    self._retained.want(block_id, retention, session)
            if session:
                at = self._next_turns.ended(session, now, next_turn_s) if ends else None
                self._retained.expect(session, at, now)
        for block_id in reversed(block_ids):
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] > 0:
                continue
            if not self._is_findable(block_id):
                self._lists.link_after(self._free, block_id)
            elif block_id not in self._retained:
                self._lists.append(self._free, block_id)
            else:
                for spare in self._retained.link(block_id, now):
                    self._lists.append(self._free, spare)

    def begin_turn(self, session: str) -> None:
        """A request of a session came, which uses what is retained for it next; how long it was away is learnt."""
        if session:
            now = self._clock()
            self._next_turns.began(session, now)
            self._retained.expect(session, None, now)

    def expect(self, session: str, next_turn_s: float) -> None:
        """The session's next turn comes that many seconds from now. Nothing happens for one that retains nothing."""
        now = self._clock()
        self._next_turns.expect(session, now + next_turn_s)
        self._retained.expect(session, now + next_turn_s, now)

    def close_session(self, session: str) -> int:
        """Retains nothing for its sake any more: what no other session wants and no sequence uses is allocated next
        after blank blocks, the last ones of a prefix first, and can be found until then. Returns how many blocks are
        not retained any more, those in use included. Nothing happens for an unknown session."""
        given_up = self._retained.close(session, self._clock())
        for block_id in given_up:
            if self._num_refs[block_id] == 0 and self._is_findable(block_id):
                self._lists.append(self._closed, block_id)
        return len(given_up)

    def seal(self, block_id: int, block_hash: bytes) -> None:
        """Declare a full block immutable and make it findable under `block_hash`.

        If another block already has that hash, that one stays the findable copy; this one is sealed all the same, and
        is reused first once free. Sealing again with the same hash does nothing. Raises ValueError for a block that is
        shared or free, or sealed with another hash.
        """
        if self._hashes[block_id] is not None:
            if self._hashes[block_id] == block_hash:
                return
            raise ValueError(f"block {block_id} is sealed with another hash")
        if self._num_refs[block_id] != 1:
            raise ValueError(f"block {block_id} has {self._num_refs[block_id]} references; only a sole owner seals")
        self._hashes[block_id] = block_hash
        if block_hash not in self._findable:
            self._findable[block_hash] = block_id
            if block_hash in self._newly_evicted:
                del self._newly_evicted[block_hash]
            else:
                self._newly_findable[block_hash] = None

    def is_writable(self, block_id: int) -> bool:
        """True when the block has one owner and is not sealed."""
        return self._num_refs[block_id] == 1 and self._hashes[block_id] is None

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash a block was sealed with, or None."""
        return self._hashes[block_id]

    def checksum_of(self, block_id: int) -> int | None:
        """The checksum of a sealed block, None until it is set."""
        return self._checksums[block_id]

    def set_checksum(self, block_id: int, checksum: int) -> None:
        """Record the checksum of a sealed block, computed once by the worker that made the block.

        Raises ValueError for an unsealed block or when a different checksum is on record.
        """
        if self._hashes[block_id] is None:
            raise ValueError(f"block {block_id} is not sealed, its bytes may still change")
        if self._checksums[block_id] not in (None, checksum):
            raise ValueError(f"block {block_id} already has another checksum")
        self._checksums[block_id] = checksum

    def cached_hashes(self) -> list[bytes]:
        """All findable hashes, in the order in which they became so."""
        return list(self._findable)

    def drain_events(self) -> PoolEvents:
        """The net changes of `cached_hashes()` since the last call; resets them."""
        events = PoolEvents(sealed=list(self._newly_findable), evicted=list(self._newly_evicted))
        self._newly_findable = {}
        self._newly_evicted = {}
        return events

    def forget(self, block_ids: Sequence[int]) -> None:
        """Make used blocks unfindable because their content is not trusted; they stay sealed."""
        for block_id in block_ids:
            if self._is_findable(block_id):
                block_hash = self._hashes[block_id]
                assert block_hash is not None
                self._forget(block_hash)

    def clear_cache(self) -> None:
        """Forget every cached prefix. Used blocks stay sealed, but no lookup finds them any more."""
        for block_id in (*self._retained, *self._lists.listed(self._closed)):
            self._unlink(block_id)
            self._lists.link_after(self._free, block_id)
        self._retained.clear()
        for block_hash, block_id in list(self._findable.items()):
            self._forget(block_hash)
            if self._num_refs[block_id] == 0:
                self._hashes[block_id] = None
                self._checksums[block_id] = None

    def check_integrity(self) -> None:
        """Check all invariants; raises AssertionError naming the violated one. O(num_blocks)."""
        retained = self._retained.check_integrity()
        assert all(map(self._is_findable, retained)), "what is retained can be found"
        closed = self._lists.listed(self._closed)
        assert all(map(self._is_findable, closed)), "what was retained can be found until it is taken"
        listed = self._lists.listed(self._free)
        free = [*listed, *closed, *retained]
        assert len(free) == self.num_free, "num_free equals the free list's length"
        assert len(set(free)) == len(free), "no block is in the free list twice"
        assert all(refs >= 0 for refs in self._num_refs), "no negative reference count"
        unreferenced = {block_id for block_id, refs in enumerate(self._num_refs) if refs == 0}
        assert set(free) == unreferenced, "exactly the blocks without references are free"
        findable_flags = [self._is_findable(block_id) for block_id in listed]
        assert findable_flags == sorted(findable_flags), "blank blocks precede cached ones in the free list"
        for block_hash, block_id in self._findable.items():
            assert self._hashes[block_id] == block_hash, "a findable block holds the hash it is found by"
        for block_id, sealed_as in enumerate(self._hashes):
            if sealed_as is None:
                assert self._checksums[block_id] is None, "only sealed blocks have a checksum"
        assert not self._newly_findable.keys() & self._newly_evicted.keys(), "events are net changes"
        assert self._newly_findable.keys() <= self._findable.keys(), "a hash reported as sealed is findable"
        assert not self._newly_evicted.keys() & self._findable.keys(), "a hash reported as evicted is gone"

    def _is_findable(self, block_id: int) -> bool:
        block_hash = self._hashes[block_id]
        return block_hash is not None and self._findable.get(block_hash) == block_id

    def _forget(self, block_hash: bytes) -> None:
        """Make a findable hash unfindable and note it for the index."""
        del self._findable[block_hash]
        if block_hash in self._newly_findable:
            del self._newly_findable[block_hash]
        else:
            self._newly_evicted[block_hash] = None

    def _take(self) -> int:
        """Unlink the free block that is missed least and clear its hash and checksum."""
        block_id = self._lists.after[self._free]
        has_cached = block_id != self._free
        if not has_cached or self._is_findable(block_id):
            block_id = self._first_findable(block_id if has_cached else None)
        self._unlink(block_id)
        self._retained.taken(block_id)
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            if self._findable.get(block_hash) == block_id:
                self._forget(block_hash)
            self._hashes[block_id] = None
            self._checksums[block_id] = None
        return block_id

    def _first_findable(self, cached: int | None) -> int:
        """The block that is taken where none is blank; `cached`: the first of those that are not retained."""
        if not self._lists.is_empty(self._closed):
            return self._lists.after[self._closed]
        if not len(self._retained):
            assert cached is not None
            return cached
        now = self._clock()
        expired = self._retained.expired(now)
        if expired is not None:
            return expired
        chosen = self._retained.furthest(now) if cached is None or self._retained.is_over else cached
        assert chosen is not None, "there is a free block"
        return chosen

    def _unlink(self, block_id: int) -> None:
        if not self._retained.unlink(block_id):
            self._lists.unlink(block_id)
