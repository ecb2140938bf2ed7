"""Free blocks that are *retained* for a time after their last use, and which of them gives way first. Policy only.

Blocks whose time has passed go first. Of the others, the one goes whose next use is furthest, as Belady's optimal
replacement has it (IBM Systems Journal 5(2), 1966), as far as that is known:

    expected    all sessions that want the block are *expected* back, the nearest at a time p. The blocks of a session
                are in one list, the end of its prefix first, and as far as |now - p|: one that is late by 10 s is
                taken to need 10 s more
    otherwise   in the list of its time of retention, from the least to the most recently released. It is as far as its
                last use is behind, so that among such blocks, last use decides

The furthest session is at one of two ends, the latest p or the earliest, of two heaps. A block that several expected
sessions want may lie with any of them; it moves to the nearest where its turn comes in the list of another one, which
is never too soon. So a block costs O(log sessions). That a session is expected whose blocks were retained before
costs O(1) for each of them, once.

At most MOST_RETAINED of a pool are retained, so that room is left for all others; of more, one gives way, which is
cached as others are. Expected ones take of that room what others do not use, up to MOST_EXPECTED: each that gives way
for want of room lowers it by a block, and each other cached block that is used again raises it by one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter

from shared.kv.free_lists import FreeLists

RETENTIONS_S = (300.0, 3600.0, 86_400.0)
"""For how long a block may be retained: 5 minutes, an hour, a day, as clients ask for. Seconds."""
MOST_RETAINED = 75
"""Most of a pool's blocks that are retained where others use the rest. Percent."""
MOST_EXPECTED = 95
"""Most of them where others do not, and sessions are expected. Percent."""
MOST_SESSIONS = 32
"""Sessions that are noted with a block: one that more want, a common beginning, is retained for its time."""
NO_SESSION = ""
"""Wants a block retained whichever session is closed."""
MOST_MOVES = 256
"""Blocks that move to another list before one gives way: of more, the last one does, maybe a little soon."""
_SPARE = 64
"""Outdated entries that a heap or a queue may hold beside as many as four times those that count."""


class RetainedBlocks:
    """Which blocks are to be retained, by whom, and those that are: free ones, in lists of `FreeLists`."""

    def __init__(self, lists: FreeLists) -> None:
        self._lists = lists
        self._by_time = tuple(lists.new() for _ in RETENTIONS_S)
        self._by_session: dict[str, int] = {}  # lists of those expected; none is empty
        self._session_of: dict[int, str] = {}  # the same, by list
        self._lies_with: dict[int, str] = {}  # of the blocks in these lists: whose it is
        self._places: dict[int, int] = {}  # of blocks to be retained: the place in RETENTIONS_S
        self._wanted_by: dict[int, set[str]] = {}  # of the same: the sessions that want it retained
        self._wants: dict[str, dict[int, None]] = {}  # by session, in the order of their last release
        self._expected: dict[str, float] = {}  # when sessions in _wants come back, where that is known
        self._latest: list[tuple[float, str]] = []  # heap of (-p, session); entries that do not hold any more stay
        self._earliest: list[tuple[float, str]] = []  # heap of (p, session), likewise
        self._ends: dict[int, float] = {}  # of those that are retained: when their time ends
        self._due: tuple[deque[tuple[float, int]], ...] = tuple(deque() for _ in RETENTIONS_S)  # (end, block), likewise
        self._gave_way: set[int] = set()  # cached blocks that were retained and expected before
        self._most_retained = lists.num_blocks * MOST_RETAINED // 100
        self._most_expected = lists.num_blocks * MOST_EXPECTED // 100
        self._num_allowed = self._most_retained  # of those expected and the others together

    def __len__(self) -> int:
        """Free blocks that are retained, also those whose time has passed."""
        return len(self._ends)

    def __iter__(self) -> Iterator[int]:
        """Iterates the ids of the retained free blocks."""
        return iter(self._ends)

    def __contains__(self, block_id: int) -> bool:
        """Whether a block, used or free, is to be retained."""
        return block_id in self._places

    @property
    def is_unused(self) -> bool:
        """Whether no block is to be retained."""
        return not self._places

    def want(self, block_id: int, place: int, session: str) -> None:
        """A used block is to be retained for RETENTIONS_S[place], or longer where it was so before."""
        self._places[block_id] = max(place, self._places.get(block_id, -1))
        wanted_by = self._wanted_by.setdefault(block_id, set())
        if session != NO_SESSION and session not in wanted_by and len(wanted_by) >= MOST_SESSIONS:
            session = NO_SESSION
        wanted_by.add(session)
        if session != NO_SESSION:
            blocks = self._wants.setdefault(session, {})
            blocks.pop(block_id, None)
            blocks[block_id] = None

    def link(self, block_id: int, now: float) -> list[int]:
        """Retains a free block that is to be. Returns the blocks that give way, two at most, maybe this one: they are
        in no list and not to be retained any more."""
        session, place = self._nearest(block_id, now), self._places[block_id]
        self._ends[block_id] = end = now + RETENTIONS_S[place]
        self._note_end(self._due[place], end, block_id)
        self._place(block_id, session)
        spares: list[int] = []
        while len(spares) < 2 and (spare := self._spare(place, now)) is not None:
            if spare in self._lies_with:
                self._gave_way.add(spare)
                self._num_allowed = min(self._num_allowed + (session is not None), self._most_expected)
            self.unlink(spare)
            self.give_up(spare)
            spares.append(spare)
        return spares

    @property
    def is_over(self) -> bool:
        """Whether more is retained than may be, since others use their room: then a retained block goes first."""
        return len(self._ends) > (self._num_allowed if self._by_session else self._most_retained)

    def _spare(self, place: int, now: float) -> int | None:
        """The block that gives way for want of room, where one has come for RETENTIONS_S[place]; None where there is
        room for all."""
        if self.is_over and self._by_session:
            return self.furthest(now)
        if len(self._ends) - len(self._lies_with) > self._most_retained:
            head = self._head(self._by_time[place])
            return self._oldest() if head is None else head
        return None

    def others_used(self, block_ids: Sequence[int]) -> None:
        """Cached blocks that were not retained are used again: others need their room."""
        if not self._gave_way and self._num_allowed == self._most_retained:
            return
        num_others = sum(block_id not in self._gave_way for block_id in block_ids)
        self._num_allowed = max(self._num_allowed - num_others, self._most_retained)
        self._gave_way.difference_update(block_ids)

    def taken(self, block_id: int) -> None:
        """A block in no list is written anew, and not to be retained any more."""
        self._gave_way.discard(block_id)
        if block_id in self._places:
            self.give_up(block_id)

    def unlink(self, block_id: int) -> bool:
        """Removes a block from its list, and it is still to be retained; False where it is in none of these lists."""
        if self._ends.pop(block_id, None) is None:
            return False
        self._take_out(block_id)
        return True

    def give_up(self, block_id: int) -> None:
        """No session wants a block in no list retained any more."""
        del self._places[block_id]
        for session in self._wanted_by.pop(block_id):
            if session != NO_SESSION:
                self._wants[session].pop(block_id)
                if not self._wants[session]:
                    del self._wants[session]
                    self._expected.pop(session, None)

    def expired(self, now: float) -> int | None:
        """The block whose time passed first; None where none has passed."""
        heads = []
        for queue in self._due:
            while queue and self._ends.get(queue[0][1]) != queue[0][0]:
                queue.popleft()
            if queue:
                heads.append(queue[0])
        first_end, first = min(heads, key=itemgetter(0), default=(math.inf, -1))
        return first if first_end <= now else None

    def furthest(self, now: float) -> int | None:
        """The retained block that gives way first where no time has passed; None where there is none."""
        oldest = self._oldest()
        age_s = -1.0
        if oldest is not None:
            age_s = now - (self._ends[oldest] - RETENTIONS_S[self._places[oldest]])
        num_moved = 0
        while self._by_session:
            session = self._furthest_session(now)
            if age_s >= abs(now - self._expected[session]):
                break
            block_id = self._lists.after[self._by_session[session]]
            nearest = self._nearest(block_id, now)
            if nearest == session or num_moved == MOST_MOVES:
                return block_id
            self._take_out(block_id)
            self._place(block_id, nearest)
            num_moved += 1
        return oldest

    def expect(self, session: str, at: float | None, now: float) -> None:
        """The session comes back then; None: it is not known when, and last use decides. Nothing happens for a session
        for which nothing is to be retained."""
        was_expected = session in self._expected
        if session not in self._wants or (at is None and not was_expected):
            return
        self._expected[session] = now if at is None else at
        if session in self._by_session:
            self._push(session)
        if was_expected:  # its blocks lie with it, or with one that is further
            return
        for block_id in self._wants[session]:
            if block_id in self._ends and block_id not in self._lies_with:
                self._place_anew(block_id, now)

    def close(self, session: str, now: float) -> list[int]:
        """Blocks that no session wants retained any more now that this one does not, in no list now unless they are
        used, in the order of their last release."""
        given_up = []
        for block_id in self._wants.pop(session, {}):
            self._wanted_by[block_id].discard(session)
            is_retained = block_id in self._ends
            if not self._wanted_by[block_id]:
                given_up.append(block_id)
                if is_retained:
                    self._take_out(block_id)
                    del self._ends[block_id]
                del self._places[block_id], self._wanted_by[block_id]
            elif is_retained and self._lies_with.get(block_id) in (None, session):
                self._place_anew(block_id, now)
        self._expected.pop(session, None)
        return given_up

    def _place_anew(self, block_id: int, now: float) -> None:
        """Moves a retained block where who wants it is expected, and was not, or the other way round."""
        nearest = self._nearest(block_id, now)
        if nearest != self._lies_with.get(block_id):
            self._take_out(block_id)
            self._place(block_id, nearest)

    def clear(self) -> None:
        """Nothing is to be retained any more; the retained blocks are in no list then."""
        for block_id in self._ends:
            self._take_out(block_id)
        for noted in (self._ends, self._places, self._wanted_by, self._wants, self._expected):
            noted.clear()

    def check_integrity(self) -> list[int]:
        """The retained blocks as they lie in lists; raises AssertionError naming a violated invariant."""
        by_time = [self._lists.listed(sentinel) for sentinel in self._by_time]
        by_session = {session: self._lists.listed(sentinel) for session, sentinel in self._by_session.items()}
        listed = [block_id for blocks in (*by_time, *by_session.values()) for block_id in blocks]
        assert set(listed) == self._ends.keys(), "what is retained has an end"
        assert len(listed) <= self._most_expected, "no more is retained than may be"
        for place, blocks in enumerate(by_time):
            assert all(self._places[block_id] == place for block_id in blocks), "each in the list of its time"
        for session, blocks in by_session.items():
            assert blocks, "a session's list is not empty"
            assert all(session in self._wanted_by[block_id] for block_id in blocks), "each in a list of who wants it"
            assert all(self._wanted_by[block_id] <= self._expected.keys() for block_id in blocks), "all are expected"
            assert all(self._lies_with[block_id] == session for block_id in blocks), "whose list it is is noted"
            at = self._expected[session]
            assert (-at, session) in self._latest, "a session is found from the latest"
            assert (at, session) in self._earliest, "a session is found from the earliest"
        num_expected = sum(map(len, by_session.values()))
        assert num_expected == len(self._lies_with), "no other block lies with a session"
        for blocks in by_time:
            assert not any(self._wanted_by[block_id] <= self._expected.keys() for block_id in blocks), "others by time"
        assert self._expected.keys() <= self._wants.keys(), "only sessions that want something are expected"
        assert self._places.keys() == self._wanted_by.keys(), "what is to be retained is wanted by someone"
        pairs = {(name, block_id) for block_id, names in self._wanted_by.items() for name in names if name}
        assert pairs == {(name, block_id) for name, ids in self._wants.items() for block_id in ids}, "both ways alike"
        due = {entry for queue in self._due for entry in queue}
        assert {(end, block_id) for block_id, end in self._ends.items()} <= due, "each end is noted"
        longest = max(len(self._latest), len(self._earliest), *map(len, self._due))
        assert longest <= 4 * self._lists.num_blocks + _SPARE, "what is over is dropped from queues and heaps"
        return listed

    def _note_end(self, queue: deque[tuple[float, int]], end: float, block_id: int) -> None:
        queue.append((end, block_id))
        if len(queue) > 4 * len(self._ends) + _SPARE:
            kept = [entry for entry in queue if self._ends.get(entry[1]) == entry[0]]
            queue.clear()
            queue.extend(kept)

    def _place(self, block_id: int, session: str | None) -> None:
        """Into the list of an expected session, or of its time."""
        if session is None:
            self._lists.append(self._by_time[self._places[block_id]], block_id)
            return
        sentinel = self._by_session.get(session)
        if sentinel is None:
            sentinel = self._by_session[session] = self._lists.new()
            self._session_of[sentinel] = session
            self._push(session)
        self._lies_with[block_id] = session
        self._lists.append(sentinel, block_id)

    def _take_out(self, block_id: int) -> None:
        self._lies_with.pop(block_id, None)
        sentinel = self._lists.unlink(block_id)
        if sentinel is not None and sentinel in self._session_of:
            del self._by_session[self._session_of.pop(sentinel)]
            self._lists.drop(sentinel)

    def _push(self, session: str) -> None:
        at = self._expected[session]
        heappush(self._latest, (-at, session))
        heappush(self._earliest, (at, session))
        if len(self._latest) > 4 * len(self._by_session) + _SPARE:
            self._latest = [(-self._expected[name], name) for name in self._by_session]
            heapify(self._latest)
        if len(self._earliest) > 4 * len(self._by_session) + _SPARE:
            self._earliest = [(self._expected[name], name) for name in self._by_session]
            heapify(self._earliest)

    def _furthest_session(self, now: float) -> str:
        """The session furthest in time, of those with a list; there is one at least."""
        latest, earliest = self._latest, self._earliest
        while latest[0][1] not in self._by_session or self._expected[latest[0][1]] != -latest[0][0]:
            heappop(latest)
        while earliest[0][1] not in self._by_session or self._expected[earliest[0][1]] != earliest[0][0]:
            heappop(earliest)
        return max(latest[0][1], earliest[0][1], key=lambda session: abs(now - self._expected[session]))

    def _nearest(self, block_id: int, now: float) -> str | None:
        """The session nearest in time, of those that want the block; None where not all are expected."""
        expected = self._expected
        found, least_s = None, math.inf
        for session in self._wanted_by[block_id]:
            at = expected.get(session)
            if at is None:
                return None
            far_s = abs(now - at)
            if far_s < least_s or (far_s == least_s and found is not None and session < found):
                found, least_s = session, far_s
        return found

    def _oldest(self) -> int | None:
        """The block whose time ends first, of the lists by time."""
        heads = [head for sentinel in self._by_time if (head := self._head(sentinel)) is not None]
        return min(heads, key=self._ends.__getitem__, default=None)

    def _head(self, sentinel: int) -> int | None:
        block_id = self._lists.after[sentinel]
        return None if block_id == sentinel else block_id
