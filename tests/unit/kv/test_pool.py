"""The block pool: exact orders by hand, and a state machine against a model made of plain lists."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.kv.pool import BlockPool, OutOfBlocks
from shared.kv.retained import MOST_RETAINED, MOST_SESSIONS, RETENTIONS_S
from tests.examples import examples

NUM_BLOCKS = 6


def named(name: int) -> bytes:
    return bytes([name]) * 16


def sealed_sequence(pool: BlockPool, *names: int) -> list[int]:
    block_ids = pool.allocate(len(names))
    for block_id, name in zip(block_ids, names, strict=True):
        pool.seal(block_id, named(name))
    return block_ids


def test_a_revived_block_is_safe_from_eviction() -> None:
    pool = BlockPool(3, 16)
    first, second = sealed_sequence(pool, 1, 2)
    pool.release([first, second])
    pool.acquire(pool.match([named(1)]))
    assert pool.num_free == 2
    assert first not in pool.allocate(2)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(1)
    assert (caught.value.needed, caught.value.free) == (1, 0)


def test_events_are_net_of_what_was_undone_in_between() -> None:
    pool = BlockPool(1, 16)
    pool.release(sealed_sequence(pool, 1))
    pool.release(pool.allocate(1))
    assert pool.drain_events().sealed == pool.drain_events().evicted == []
    pool.release(sealed_sequence(pool, 2))
    assert pool.drain_events().sealed == [named(2)]
    pool.release(sealed_sequence(pool, 2))  # evicted, then sealed again: the index need not know
    events = pool.drain_events()
    assert (events.sealed, events.evicted) == ([], [])


def test_misuse_raises_and_changes_nothing() -> None:
    pool = BlockPool(3, 16)
    first, second = pool.allocate(2)
    with pytest.raises(ValueError, match="released 2 times"):
        pool.release([second, first, first])
    with pytest.raises(ValueError, match="no cached prefix"):
        pool.acquire([first, 2])
    pool.acquire([first])
    with pytest.raises(ValueError, match="sole owner"):
        pool.seal(first, named(1))
    pool.seal(second, named(1))
    with pytest.raises(ValueError, match="another hash"):
        pool.seal(second, named(2))
    with pytest.raises(ValueError, match="not sealed"):
        pool.set_checksum(first, 7)
    pool.set_checksum(second, 7)
    with pytest.raises(ValueError, match="another checksum"):
        pool.set_checksum(second, 8)
    assert (pool.checksum_of(second), pool.num_used) == (7, 2)
    pool.release([first, first, second])
    pool.check_integrity()


def test_nothing_may_be_allocated_and_less_than_nothing_not() -> None:
    pool = BlockPool(2, 16)
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="cannot allocate -1 blocks"):
        pool.allocate(-1)
    assert len(pool.allocate(2)) == 2


def test_a_free_block_is_not_sealed() -> None:
    with pytest.raises(ValueError, match="has 0 references"):
        BlockPool(2, 16).seal(0, named(1))


def test_a_block_whose_content_is_not_trusted_is_found_no_more_and_stays_sealed() -> None:
    pool = BlockPool(4, 16)
    first, second, third = sealed_sequence(pool, 1, 2, 3)
    pool.drain_events()
    pool.forget([second, third])
    assert pool.match([named(1), named(2)]) == [first]
    assert pool.drain_events().evicted == [named(2), named(3)]
    assert (pool.hash_of(second), pool.is_writable(second)) == (named(2), False)
    pool.forget([second])
    assert pool.drain_events().evicted == []
    pool.release([first, second, third])
    assert pool.allocate(3)[-1] != first
    pool.check_integrity()


def test_a_shared_block_is_used_until_its_last_reference_is_given_back() -> None:
    pool = BlockPool(2, 16)
    [shared] = pool.allocate(1)
    pool.acquire([shared, shared])
    for num_used in (1, 1, 0):
        pool.release([shared])
        assert pool.num_used == num_used
    pool.check_integrity()


def test_a_cleared_cache_leaves_free_blocks_blank_and_used_ones_sealed() -> None:
    pool = BlockPool(3, 16)
    used, free = sealed_sequence(pool, 1, 2)
    pool.set_checksum(free, 7)
    pool.release([free])
    pool.clear_cache()
    assert (pool.match([named(1)]), pool.num_cached) == ([], 0)
    assert (pool.hash_of(used), pool.hash_of(free), pool.checksum_of(free)) == (named(1), None, None)
    pool.check_integrity()


CORRUPTIONS = {
    "num_free equals": lambda pool: setattr(pool._lists, "num_linked", pool.num_free + 1),
    "free list links agree: at the head": lambda pool: pool._lists.before.__setitem__(pool._lists.after[pool._free], 0),
    "free list links agree: at the tail": lambda pool: pool._lists.before.__setitem__(pool._free, 0),
    "free list links agree: between": lambda pool: pool._lists.before.__setitem__(4, 0),
    "no negative": lambda pool: pool._num_refs.__setitem__(0, -1),
    "exactly the blocks without references are free: one lost": lambda pool: pool._num_refs.__setitem__(0, 0),
    "exactly the blocks without references are free": lambda pool: pool._num_refs.__setitem__(3, 1),
    "blank blocks precede": lambda pool: (pool._unlink(2), pool._lists.link_after(pool._free, 2)),
    "a findable block holds": lambda pool: pool._findable.__setitem__(named(9), 0),
    "only sealed blocks": lambda pool: pool._checksums.__setitem__(3, 5),
    "events are net": lambda pool: pool._newly_evicted.__setitem__(named(1), None),
    "a hash reported as sealed": lambda pool: pool._newly_findable.__setitem__(named(9), None),
    "a hash reported as evicted": lambda pool: (
        pool._newly_findable.clear(),
        pool._newly_evicted.__setitem__(named(1), None),
    ),
}


@pytest.mark.parametrize("broken", CORRUPTIONS)
def test_the_check_of_integrity_names_what_is_broken(broken: str) -> None:
    """Block 0 is used and sealed as 1, block 1 used, block 2 free and cached as 2, blocks 3 to 5 blank."""
    pool = BlockPool(NUM_BLOCKS, 16)
    used, blank, cached = pool.allocate(3)
    assert (used, blank, cached) == (0, 1, 2)
    pool.seal(used, named(1))
    pool.seal(cached, named(2))
    pool.release([cached])
    pool.check_integrity()
    CORRUPTIONS[broken](pool)
    with pytest.raises(AssertionError, match=broken.partition(":")[0]):
        pool.check_integrity()


def test_a_free_list_that_runs_in_a_circle_is_noticed() -> None:
    pool = BlockPool(4, 16)
    pool._lists.after[1], pool._lists.before[0] = 0, 1  # 0 → 1 → 0
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_what_is_retained_goes_last_and_first_once_its_time_has_passed() -> None:
    now = 0.0
    pool = BlockPool(6, 16, clock=lambda: now)
    a, b, c = (sealed_sequence(pool, name)[0] for name in (1, 2, 3))
    rest = pool.allocate(3)
    pool.release([a], 3600.0)
    pool.release([b], 300.0)
    pool.release([c])
    assert pool.num_retained == 2
    now = 299.0
    assert pool.allocate(1) == [c]
    pool.acquire(pool.match([named(2)]))
    pool.release([b])  # used again: its time begins anew, without a word
    now = 598.0
    pool.release([c])
    for expected in (c, b, a):
        assert pool.allocate(1) == [expected]
    pool.release([*rest, a, b, c])

    first, second = (sealed_sequence(pool, name)[0] for name in (4, 5))
    pool.release([first], 300.0)
    pool.release([second])
    now += 300.0
    rest = pool.allocate(4)
    assert pool.allocate(2) == [first, second]  # its time has passed
    pool.check_integrity()


def test_a_longer_retention_replaces_a_shorter_one_and_what_lost_its_own_is_as_others() -> None:
    pool = BlockPool(5, 16, clock=lambda: 0.0)
    a, b, c, d = (sealed_sequence(pool, name)[0] for name in (1, 2, 3, 4))
    rest = pool.allocate(1)
    for block_id, retain_s in ((a, 3600.0), (a, 300.0), (b, 300.0), (c, 300.0), (d, 300.0)):
        pool.acquire([block_id])
        pool.release([block_id], retain_s)
    pool.release([a, b, c, d])
    assert pool.num_retained == 3
    # Reversed, as of a sequence: d, c, b and then a, for whose list nothing makes room.
    assert pool.allocate(4) == [a, d, c, b]
    pool.release([*rest, a, b, c, d])
    pool.check_integrity()


def test_what_a_closed_session_retained_alone_goes_next_its_last_block_first() -> None:
    pool = BlockPool(8, 16, clock=lambda: 0.0)
    shared, own, other, plain = (sealed_sequence(pool, name)[0] for name in (1, 2, 3, 4))
    last = sealed_sequence(pool, 5)[0]
    rest = pool.allocate(3)
    pool.acquire([shared])
    pool.release([shared, other], 300.0, "b")
    pool.release([shared, own, last], 300.0, "a")
    pool.release([plain])
    assert pool.close_session("unknown") == 0
    assert pool.close_session("a") == 2
    assert pool.close_session("a") == 0
    assert pool.match([named(1), named(2), named(5)]) == [shared, own, last]  # until it is taken
    assert pool.allocate(4) == [last, own, plain, other]
    pool.check_integrity()
    pool.release([*rest, own, last, plain, other])
    assert pool.close_session("b") == 1
    pool.check_integrity()


def test_a_block_in_use_is_not_retained_any_more_once_its_session_is_closed() -> None:
    pool = BlockPool(4, 16, clock=lambda: 0.0)
    block, other = sealed_sequence(pool, 1, 2)
    pool.acquire([block])
    pool.release([block], 300.0, "a")
    assert pool.close_session("a") == 1
    pool.release([other], 300.0, "b")
    pool.release([block])
    assert pool.num_retained == 1
    assert pool.allocate(4)[2:] == [block, other]


def test_a_beginning_that_very_many_sessions_share_is_retained_for_its_time() -> None:
    pool = BlockPool(4, 16, clock=lambda: 0.0)
    block = sealed_sequence(pool, 1)[0]
    names = [f"s{number}" for number in range(MOST_SESSIONS + 5)]
    for name in names:
        pool.acquire([block])
        pool.release([block], 300.0, name)
    pool.release([block])
    assert [pool.close_session(name) for name in names] == [0] * len(names)
    assert pool.num_retained == 1
    pool.check_integrity()


RETAINED = st.sampled_from([0.0, 299.0, *RETENTIONS_S, 1e6])
SESSIONS = st.sampled_from(["", "a", "b"])


class PoolMachine(RuleBasedStateMachine):
    """The model: references by block, hashes by block, the cached blocks in eviction order, the retained, and what
    sessions want."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(NUM_BLOCKS, 16, clock=lambda: self.now)
        self.retentions: dict[int, int] = {}  # of blocks: the place in RETENTIONS_S
        self.retained: list[tuple[float, int, int]] = []  # (end, order of release, block)
        self.wanted: dict[int, set[str]] = {}  # of blocks to be retained: the sessions, "" for those of none
        self.wants: dict[str, list[int]] = {}
        self.closed: list[int] = []
        self.num_released = 0
        self.refs: dict[int, int] = {}
        self.sealed: dict[int, bytes] = {}
        self.findable: dict[bytes, int] = {}
        self.cached: list[int] = []
        self.indexed: set[bytes] = set()

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        num_free = NUM_BLOCKS - len(self.refs)
        if count > num_free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        num_evicted = max(0, count - (num_free - len(self.cached) - len(self.retained) - len(self.closed)))
        evicted = [self.evict() for _ in range(num_evicted)]
        got = self.pool.allocate(count)
        assert got[count - num_evicted :] == evicted
        for block_id in got:
            self.give_up(block_id)
            assert block_id not in self.refs
            block_hash = self.sealed.pop(block_id, None)
            if block_hash is not None and self.findable.get(block_hash) == block_id:
                del self.findable[block_hash]
            self.refs[block_id] = 1
            assert self.pool.is_writable(block_id)

    def evict(self) -> int:
        """The block that goes next where none is blank."""
        if self.closed:
            return self.closed.pop(0)
        if self.retained and (not self.cached or min(self.retained)[0] <= self.now):
            self.retained.remove(first := min(self.retained))
            return first[2]
        return self.cached.pop(0)

    @precondition(lambda self: len(self.refs) < NUM_BLOCKS)
    @rule(name=st.integers(9, 20), retain_s=RETAINED, session=SESSIONS)
    def serve(self, name: int, retain_s: float, session: str) -> None:
        """As a sequence of one block does; names of its own, so that most are new."""
        self.allocate(1)
        block_id = next(reversed(self.refs))
        self.pool.seal(block_id, named(name))
        self.sealed[block_id] = named(name)
        self.findable.setdefault(named(name), block_id)
        self.give_back([block_id], retain_s, session)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), retain_s=RETAINED, session=SESSIONS)
    def release(self, data: st.DataObject, retain_s: float, session: str) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True, min_size=1))
        self.give_back(chosen, retain_s, session)

    def give_back(self, chosen: list[int], retain_s: float, session: str) -> None:
        self.pool.release(chosen, retain_s, session)
        asked = sum(retain_s >= at_least for at_least in RETENTIONS_S) - 1
        for block_id in reversed(chosen):
            is_findable = self.findable.get(self.sealed.get(block_id, b"")) == block_id
            if is_findable and asked >= 0:
                self.retentions[block_id] = max(asked, self.retentions.get(block_id, -1))
                self.wanted.setdefault(block_id, set()).add(session)
                if session and block_id not in self.wants.setdefault(session, []):
                    self.wants[session].append(block_id)
            self.refs[block_id] -= 1
            if self.refs[block_id]:
                continue
            del self.refs[block_id]
            if is_findable and block_id in self.retentions:
                self.retain(block_id)
            elif is_findable:
                self.cached.append(block_id)

    def retain(self, block_id: int) -> None:
        """At most MOST_RETAINED: the one of its kind that was released first is then cached as others are."""
        place = self.retentions[block_id]
        self.num_released += 1
        alike = [item for item in sorted(self.retained) if self.retentions[item[2]] == place]
        alike.append((self.now + RETENTIONS_S[place], self.num_released, block_id))
        self.retained.append(alike[-1])
        if len(self.retained) > NUM_BLOCKS * MOST_RETAINED // 100:
            self.retained.remove(alike[0])
            self.give_up(alike[0][2])
            self.cached.append(alike[0][2])

    def give_up(self, block_id: int) -> None:
        """It is not to be retained any more."""
        self.retentions.pop(block_id, None)
        for session in self.wanted.pop(block_id, set()) - {""}:
            self.wants[session].remove(block_id)

    @rule(session=SESSIONS)
    def close_session(self, session: str) -> None:
        alone = [block_id for block_id in self.wants.get(session, []) if self.wanted[block_id] == {session}]
        assert self.pool.close_session(session) == len(alone)
        for block_id in self.wants.pop(session, []):
            self.wanted[block_id].discard(session)
        for block_id in alone:
            del self.retentions[block_id], self.wanted[block_id]
            is_free = block_id not in self.refs and self.findable.get(self.sealed.get(block_id, b"")) == block_id
            self.retained = [item for item in self.retained if item[2] != block_id]
            if is_free:
                self.closed.append(block_id)

    @rule(seconds=st.sampled_from([1.0, 200.0, 4000.0, 90_000.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def release_once_too_often(self, block_id: int) -> None:
        with pytest.raises(ValueError, match="released"):
            self.pool.release([block_id] * (self.refs.get(block_id, 0) + 1))

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), name=st.integers(0, 8))
    def seal(self, data: st.DataObject, name: int) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.refs)))
        if self.sealed.get(block_id, named(name)) != named(name) or (
            block_id not in self.sealed and self.refs[block_id] > 1
        ):
            with pytest.raises(ValueError, match=f"block {block_id}"):
                self.pool.seal(block_id, named(name))
            return
        self.pool.seal(block_id, named(name))
        if block_id not in self.sealed:
            self.sealed[block_id] = named(name)
            self.findable.setdefault(named(name), block_id)

    @rule(names=st.lists(st.integers(0, 20), max_size=4, unique=True))
    def acquire_matched(self, names: list[int]) -> None:
        expected = []
        for name in names:
            if named(name) not in self.findable:
                break
            expected.append(self.findable[named(name)])
        found = self.pool.match([named(name) for name in names])
        assert found == expected
        self.pool.acquire(found)
        for block_id in found:
            if block_id in self.cached:
                self.cached.remove(block_id)
            if block_id in self.closed:
                self.closed.remove(block_id)
            self.retained = [item for item in self.retained if item[2] != block_id]
            self.refs[block_id] = self.refs.get(block_id, 0) + 1

    @rule()
    def drain(self) -> None:
        events = self.pool.drain_events()
        self.indexed = (self.indexed - set(events.evicted)) | set(events.sealed)
        assert self.indexed == set(self.pool.cached_hashes())

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.refs)), max_size=4))
        self.pool.forget(block_ids)
        for name in [name for name, block_id in self.findable.items() if block_id in block_ids]:
            del self.findable[name]

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()
        self.findable.clear()
        self.cached.clear()
        self.retentions.clear()
        self.retained.clear()
        self.wanted.clear()
        self.wants.clear()
        self.closed.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.refs)
        assert self.pool.num_free == NUM_BLOCKS - len(self.refs)
        assert self.pool.num_retained == len(self.retained)
        assert set(self.pool.cached_hashes()) == set(self.findable)
        for block_id, count in self.refs.items():
            assert self.pool.is_writable(block_id) == (count == 1 and block_id not in self.sealed)


PoolMachine.TestCase.settings = examples(60, stateful_step_count=40)
TestPoolAgainstModel = PoolMachine.TestCase
