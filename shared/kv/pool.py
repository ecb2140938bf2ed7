"""Ownership of blocks, and the order in which cached blocks are evicted. Policy only: no tensors.

A block is in one of three states:

    used    num_refs ≥ 1; writable while num_refs == 1 and it is not sealed
    cached  num_refs == 0, sealed, findable by its hash; `acquire` revives it
    blank   num_refs == 0 and nothing worth keeping

Blank and cached blocks are in one free list: first the blank ones, then the cached ones from the least to the most
recently released. `allocate` takes from the head, so no cached block is lost while a blank one is left.

A cached block that is to be *retained* for a time after its last use is in the list of that time instead, from the
least to the most recently released, and so by the end of its time. `allocate` takes blank blocks, then those whose time
has passed, then cached ones, and retained ones last. At most MOST_RETAINED of the pool are retained: of more, the
least recently released is cached as others are. Each session that wants a block retained is noted with it: where the
last of them is closed, `allocate` takes the block next after the blank ones.

The lists are intrusive, two arrays of neighbours and a sentinel each, because removing a block from the middle must be
O(1), which a deque cannot do.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RETENTIONS_S = (300.0, 3600.0, 86_400.0)
"""For how long a block may be retained: 5 minutes, an hour, a day, as clients ask for. Seconds."""

MOST_RETAINED = 75
"""Most of a pool's blocks that are retained, so that room is left for all others. Percent."""

MOST_SESSIONS = 32
"""Sessions that are noted with a block: one that more want, a common beginning, is retained for its time."""
_NO_SESSION = ""
"""Wants a block retained whichever session is closed."""


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
        self._block_size = block_size
        self._num_refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks  # None: not sealed
        self._checksums: list[int | None] = [None] * num_blocks
        self._findable: dict[bytes, int] = {}  # hash -> the one block that match() returns for it
        # Neighbours of each free block. Index num_blocks is the sentinel before the free list's head, the later ones
        # are those of the retained, by place in RETENTIONS_S, and that of the blocks of closed sessions.
        sentinels = [num_blocks + 1 + place for place in range(len(RETENTIONS_S) + 1)]
        self._closed = sentinels[-1]
        self._next: list[int] = [*range(1, num_blocks + 1), 0, *sentinels]
        self._prev: list[int] = [num_blocks, *range(num_blocks), *sentinels]
        self._num_free = num_blocks
        self._retentions: dict[int, int] = {}  # of blocks to be retained: the place in RETENTIONS_S
        self._ends: dict[int, float] = {}  # of those that are: when their time ends
        self._wanted_by: dict[int, set[str]] = {}  # of the same: the sessions that want it retained
        self._wants: dict[str, dict[int, None]] = {}  # by session, in the order of their release
        self._most_retained = num_blocks * MOST_RETAINED // 100
        self._clock = clock
        # Insertion-ordered sets of the changes since the last drain.
        self._newly_findable: dict[bytes, None] = {}
        self._newly_evicted: dict[bytes, None] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out: blank and cached ones."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self._num_blocks - self._num_free

    @property
    def num_retained(self) -> int:
        """Free blocks that are retained, also those whose time has passed."""
        return len(self._ends)

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
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                self._unlink(block_id)
            self._num_refs[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """`num_blocks` writable blocks with one reference each, or OutOfBlocks and no change.

        Blank blocks go first, then those of closed sessions, then retained ones whose time has passed, then cached
        ones, least recently released first, then retained ones; all but the blank ones lose their hash.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self._num_free:
            raise OutOfBlocks(num_blocks, self._num_free)
        block_ids = [self._take() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_refs[block_id] = 1
        return block_ids

    def release(self, block_ids: Sequence[int], retain_s: float = 0.0, session: str = _NO_SESSION) -> None:
        """Give back one reference on each block, in the order of a sequence's block table.

        With `retain_s`, findable ones are retained from now on whenever they are not in use, for the longest of
        RETENTIONS_S up to it, anew after each use, until every session that wanted so is closed; without `session`
        until their time has passed.

        Findable blocks join the free list's tail, the last block of the sequence first: so later blocks are evicted
        before earlier ones, and the rest of a prefix is still a prefix. Blocks that no lookup can find (not sealed, or
        duplicates) join its head. Raises ValueError on a double release and changes nothing.
        """
        for block_id, count in Counter(block_ids).items():
            if count > self._num_refs[block_id]:
                raise ValueError(f"block {block_id} released {count} times with {self._num_refs[block_id]} references")
        retention = max((place for place, at_least in enumerate(RETENTIONS_S) if retain_s >= at_least), default=-1)
        now = self._clock() if self._retentions or retention >= 0 else 0.0
        for block_id in reversed(block_ids):
            if retention >= 0 and self._is_findable(block_id):
                self._retentions[block_id] = max(retention, self._retentions.get(block_id, -1))
                self._want(block_id, session)
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] > 0:
                continue
            if not self._is_findable(block_id):
                self._link_after(self._num_blocks, block_id)
            elif block_id in self._retentions:
                self._retain(block_id, now)
            else:
                self._link_after(self._prev[self._num_blocks], block_id)

    def close_session(self, session: str) -> int:
        """Nothing is retained for its sake any more: what no other session wants and nobody uses is allocated next
        after blank blocks, the last ones of a prefix first, and can be found until then. Returns how many blocks are
        not retained any more, those in use included. Nothing happens for an unknown session."""
        num_given_up = 0
        for block_id in self._wants.pop(session, ()):
            wanted_by = self._wanted_by[block_id]
            wanted_by.discard(session)
            if wanted_by:
                continue
            self._give_up(block_id)
            num_given_up += 1
            if self._num_refs[block_id] == 0 and self._is_findable(block_id):
                self._unlink(block_id)
                self._link_after(self._prev[self._closed], block_id)
        return num_given_up

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
        for block_id in (*self._ends, *self._listed(self._closed)):
            self._unlink(block_id)
            self._link_after(self._num_blocks, block_id)
        self._retentions.clear()
        self._wanted_by.clear()
        self._wants.clear()
        for block_hash, block_id in list(self._findable.items()):
            self._forget(block_hash)
            if self._num_refs[block_id] == 0:
                self._hashes[block_id] = None
                self._checksums[block_id] = None

    def check_integrity(self) -> None:
        """Check all invariants; raises AssertionError naming the violated one. O(num_blocks)."""
        retained = [self._listed(self._num_blocks + 1 + place) for place in range(len(RETENTIONS_S))]
        assert sum(map(len, retained)) == len(self._ends) <= self._most_retained, "no more is retained than may be"
        for place, block_ids in enumerate(retained):
            ends = [self._ends[block_id] for block_id in block_ids]
            assert ends == sorted(ends), "retained blocks are in the order in which their time ends"
            assert all(self._retentions[block_id] == place for block_id in block_ids), "each in the list of its time"
            assert all(map(self._is_findable, block_ids)), "what is retained can be found"
        assert self._retentions.keys() == self._wanted_by.keys(), "what is to be retained is wanted by someone"
        pairs = {(name, block_id) for block_id, names in self._wanted_by.items() for name in names if name}
        assert pairs == {(name, block_id) for name, ids in self._wants.items() for block_id in ids}, "both ways alike"
        closed = self._listed(self._closed)
        assert all(map(self._is_findable, closed)), "what was retained can be found until it is taken"
        listed = self._listed(self._num_blocks)
        free = [*listed, *closed, *(block_id for block_ids in retained for block_id in block_ids)]
        assert len(free) == self._num_free, "num_free equals the free list's length"
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
        block_id = self._next[self._num_blocks]
        is_blank = block_id != self._num_blocks and not self._is_findable(block_id)
        if not is_blank and self._next[self._closed] != self._closed:
            block_id = self._next[self._closed]
        elif not is_blank and self._ends:
            heads = [self._next[self._num_blocks + 1 + place] for place in range(len(RETENTIONS_S))]
            first = min((head for head in heads if head < self._num_blocks), key=self._ends.__getitem__)
            if block_id == self._num_blocks or self._ends[first] <= self._clock():
                block_id = first
        self._unlink(block_id)
        if block_id in self._retentions:
            self._give_up(block_id)
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            if self._findable.get(block_hash) == block_id:
                self._forget(block_hash)
            self._hashes[block_id] = None
            self._checksums[block_id] = None
        return block_id

    def _retain(self, block_id: int, now: float) -> None:
        """Links a findable block that is to be retained; where too many are, the list's least recently released one is
        cached as others are."""
        place = self._retentions[block_id]
        sentinel = self._num_blocks + 1 + place
        if len(self._ends) >= self._most_retained:
            spare = self._next[sentinel]
            if spare == sentinel:
                spare = block_id
            else:
                self._unlink(spare)
            self._give_up(spare)
            self._link_after(self._prev[self._num_blocks], spare)
            if spare == block_id:
                return
        self._ends[block_id] = now + RETENTIONS_S[place]
        self._link_after(self._prev[sentinel], block_id)

    def _want(self, block_id: int, session: str) -> None:
        wanted_by = self._wanted_by.setdefault(block_id, set())
        if session != _NO_SESSION and session not in wanted_by and len(wanted_by) >= MOST_SESSIONS:
            session = _NO_SESSION
        wanted_by.add(session)
        if session != _NO_SESSION:
            self._wants.setdefault(session, {})[block_id] = None

    def _give_up(self, block_id: int) -> None:
        """No session retains it any more."""
        del self._retentions[block_id]
        for session in self._wanted_by.pop(block_id):
            if session != _NO_SESSION:
                blocks = self._wants.get(session, {})
                blocks.pop(block_id, None)
                if not blocks:
                    self._wants.pop(session, None)

    def _unlink(self, block_id: int) -> None:
        self._ends.pop(block_id, None)
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before
        self._num_free -= 1

    def _link_after(self, before: int, block_id: int) -> None:
        """Insert a block behind `before`, a free block or the sentinel (which makes it the head)."""
        after = self._next[before]
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id] = before
        self._next[block_id] = after
        self._num_free += 1

    def _listed(self, sentinel: int) -> list[int]:
        """Free block ids of one list from head to tail, bounded so that a broken link cannot loop."""
        found: list[int] = []
        before, block_id = sentinel, self._next[sentinel]
        while True:
            assert self._prev[block_id] == before, "free list links agree in both directions"
            if block_id == sentinel or len(found) > self._num_blocks:
                return found
            found.append(block_id)
            before, block_id = block_id, self._next[block_id]
