"""Among what is retained, that goes first which is used again last: by heaps and lists as by a search over all."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.kv.next_turns import MIN_PAUSES, MOST_REMEMBERED, NextTurns
from shared.kv.pool import BlockPool
from shared.kv.retained import MOST_EXPECTED, MOST_RETAINED, RETENTIONS_S
from tests.examples import examples

FIVE_MINUTES, HOUR, _ = RETENTIONS_S


class Clocked:
    """A pool, its clock, and conversations in it whose blocks are named by conversation and place."""

    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        self.pool = BlockPool(num_blocks, 16, clock=lambda: self.now)

    def turn(
        self, chain: list[bytes], retain_s: float = HOUR, session: str = "", next_turn_s: float | None = None
    ) -> int:
        """A prompt of these blocks begins and ends; returns how many of them it found."""
        self.pool.begin_turn(session)
        found = self.pool.match(chain)
        self.pool.acquire(found)
        blocks = found + self.pool.allocate(len(chain) - len(found))
        for block_id, name in zip(blocks, chain, strict=True):
            self.pool.seal(block_id, name)
        self.pool.release(blocks, retain_s, session, next_turn_s)
        return len(found)

    def left(self, chain: list[bytes]) -> int:
        """How many blocks of a chain are in the pool, which must be its first ones."""
        held = [self.pool.find(name) is not None for name in chain]
        assert held == sorted(held, reverse=True), "what is left of a prompt is a prefix"
        return sum(held)


def chain(name: str, count: int) -> list[bytes]:
    return [f"{name}/{place}".encode() for place in range(count)]


def test_the_one_that_comes_back_last_goes_first_and_its_end_before_its_beginning() -> None:
    run = Clocked(30)
    for name, next_turn_s in (("a", 20.0), ("b", 60.0), ("c", 40.0)):
        run.turn(chain(name, 8), session=name, next_turn_s=next_turn_s)
    for taken, left in ((6, (8, 8, 8)), (8, (8, 6, 8)), (16, (8, 0, 6))):
        run.pool.release(blocks := run.pool.allocate(taken))
        assert tuple(run.left(chain(name, 8)) for name in "abc") == left
        assert len(blocks) == taken
    run.pool.check_integrity()


def test_a_conversation_of_many_turns_takes_no_more_memory_after_others_have_ended() -> None:
    run = Clocked(64)
    for turn in range(11):
        run.now += 1.0
        for name in "abcdefgh":
            run.turn(chain(name, 1), session=name, next_turn_s=50.0 if turn % 2 else None)
    for name in "bcdefgh":
        run.pool.close_session(name)
    for turn in range(600):
        run.now += 1.0
        run.turn(chain("a", 1), session="a", next_turn_s=50.0 if turn % 2 else None)
    run.pool.check_integrity()
    assert run.left(chain("a", 1)) == 1


def test_what_is_said_after_the_answer_counts_and_one_that_is_late_is_as_far_as_it_is_late() -> None:
    run = Clocked(16)
    for name in "ab":
        run.turn(chain(name, 7), session=name)
    run.pool.expect("a", 50.0)
    run.pool.expect("b", 10.0)
    run.pool.expect("unknown", 1.0)
    run.now = 20.0  # 30 s before a, and 10 s behind b
    run.pool.release(run.pool.allocate(4))
    assert (run.left(chain("a", 7)), run.left(chain("b", 7))) == (5, 7)
    run.now = 45.0
    run.pool.release(run.pool.allocate(6))
    assert (run.left(chain("a", 7)), run.left(chain("b", 7))) == (5, 5)


def test_a_time_that_has_passed_comes_before_everything_that_is_expected() -> None:
    run = Clocked(20)
    run.turn(chain("soon", 6), FIVE_MINUTES, "soon", 301.0)
    run.turn(chain("late", 6), HOUR, "late", 3000.0)
    run.now = 300.0
    run.pool.release(run.pool.allocate(10))
    assert (run.left(chain("soon", 6)), run.left(chain("late", 6))) == (4, 6)


@pytest.mark.parametrize(("near", "far"), ["ab", "ba"])
def test_a_common_beginning_stays_for_the_nearest_of_those_that_want_it(near: str, far: str) -> None:
    run = Clocked(20)
    common = chain("common", 4)
    run.turn([*common, *chain(near, 4)], session=near, next_turn_s=30.0)
    run.turn([*common, *chain(far, 4)], session=far, next_turn_s=90.0)
    run.pool.release(run.pool.allocate(8 + 4))
    assert (run.left([*common, *chain(near, 4)]), run.left([*common, *chain(far, 4)])) == (8, 4)
    run.pool.release(run.pool.allocate(12 + 1))
    assert (run.left([*common, *chain(near, 4)]), run.left([*common, *chain(far, 4)])) == (7, 4)
    assert run.pool.close_session(near) == 3
    run.pool.release(run.pool.allocate(13 + 2))
    assert run.left([*common, *chain(far, 4)]) == 4
    run.pool.release(run.pool.allocate(18))
    assert run.left([*common, *chain(far, 4)]) == 2
    run.pool.check_integrity()


def test_those_that_are_expected_take_the_room_of_others_as_far_as_these_do_not_use_it() -> None:
    run = Clocked(40)
    common = chain("others", 10)

    def agents(count: int) -> int:
        for number in range(count):
            run.turn(chain(f"{number % 12}", 4), session=f"{number % 12}", next_turn_s=10.0 + number)
            run.pool.check_integrity()
        return run.pool.num_retained

    assert agents(36) == 40 * MOST_EXPECTED // 100
    for _ in range(3):
        run.turn(common, 0.0)
    assert 40 * MOST_RETAINED // 100 <= agents(1) < 40 * MOST_EXPECTED // 100
    for _ in range(6):
        run.turn(common, 0.0)
        agents(1)
    assert run.turn(common, 0.0) == len(common)
    assert run.pool.num_retained <= 40 * MOST_RETAINED // 100


def test_what_is_retained_for_no_session_takes_no_more_than_its_share() -> None:
    run = Clocked(40)
    for number in range(12):
        run.turn(chain(f"{number}", 4), session=f"{number}", next_turn_s=10.0 + number)
    assert run.pool.num_retained == 40 * MOST_EXPECTED // 100
    run.now = 1000.0  # they are late by far
    for number in range(60):
        run.turn(chain(f"plain {number}", 1))
        run.pool.check_integrity()
    plain = sum(run.pool.find(chain(f"plain {number}", 1)[0]) is not None for number in range(60))
    assert plain >= 40 * MOST_RETAINED // 100
    assert run.pool.num_retained - 40 * MOST_RETAINED // 100 <= 40 * (MOST_EXPECTED - MOST_RETAINED) // 100
    others = chain("others", 2)
    for _ in range(10):  # which take the expected ones' room
        run.turn(others, 0.0)
    run.turn(chain("soon", 1), FIVE_MINUTES, "soon", 120.0)
    run.pool.check_integrity()
    for name in [f"{number}" for number in range(12)]:
        run.pool.close_session(name)
    run.turn(chain("soon", 2), FIVE_MINUTES, "soon", 120.0)
    run.pool.close_session("soon")
    assert run.pool.num_retained <= 40 * MOST_RETAINED // 100


def test_a_beginning_that_others_use_too_does_not_go_for_the_one_that_comes_back_late() -> None:
    run = Clocked(40)
    common = chain("common", 6)
    run.turn([*common, *chain("late", 4)], session="late", next_turn_s=80_000.0)
    for number in range(3):
        run.now += 1.0
        run.turn([*common, *chain(f"{number}", 4)], session=f"{number}")
    run.pool.release(run.pool.allocate(40 - 6))
    assert run.left(common) == 6
    for name in ("0", "1", "2"):
        run.pool.expect(name, 79_000.0)
    run.pool.check_integrity()
    run.pool.close_session("late")
    run.pool.check_integrity()


def test_others_get_their_room_back_although_the_expected_ones_stay_silent() -> None:
    run = Clocked(40)
    for number in range(12):
        run.turn(chain(f"{number}", 4), session=f"{number}", next_turn_s=10.0 + number)
    common = chain("others", 10)
    for _ in range(12):
        run.turn(common, 0.0)
    assert run.turn(common, 0.0) == len(common)
    assert run.pool.num_retained <= 40 * MOST_RETAINED // 100


def test_a_turn_that_is_interrupted_does_not_end() -> None:
    run = Clocked(20)
    for name, next_turn_s in (("a", 30.0), ("b", 60.0)):
        run.turn(chain(name, 6), session=name, next_turn_s=next_turn_s)
    blocks = run.pool.match(chain("a", 6))
    run.pool.begin_turn("a")
    run.pool.acquire(blocks)
    run.pool.expect("a", 90.0)
    run.now = 5.0
    run.pool.release(blocks, HOUR, "a", ends=False)
    run.pool.acquire(blocks)
    run.now = 10.0
    run.pool.release(blocks, HOUR, "a")
    run.pool.release(run.pool.allocate(8 + 3))  # a comes back at 90, as its client said, b at 60
    assert (run.left(chain("a", 6)), run.left(chain("b", 6))) == (3, 6)


def test_regular_pauses_are_learnt_irregular_ones_are_not_and_few_sessions_are_remembered() -> None:
    turns = NextTurns()
    for name, pauses in (("even", (10.0, 20.0, 15.0)), ("odd", (1.0, 100.0, 1.0, 2.0, 1.0))):
        now = 0.0
        turns.began(name, now)
        assert turns.ended(name, now, None) is None
        for count, pause_s in enumerate(pauses, 1):
            now += pause_s
            turns.began(name, now)
            expected = turns.ended(name, now, None)
            assert (expected is None) == (count < MIN_PAUSES or name == "odd")
    turns.began("even", 60.0)
    assert turns.ended("even", 50.0, None) == 65.0
    assert turns.ended("even", 50.0, 7.0) == 57.0
    turns.began("even", 57.0)
    turns.expect("even", 90.0)
    assert turns.ended("even", 60.0, None) == 90.0
    for number in range(MOST_REMEMBERED + 9):
        turns.ended(f"{number}", 100.0, None)
    assert len(turns) == MOST_REMEMBERED
    assert turns.ended("even", 200.0, None) is None  # forgotten
    turns.expect("new", 250.0)  # while its first turn runs
    assert turns.ended("new", 210.0, None) == 250.0


NAMES = st.sampled_from("abcd")
TIMES_S = st.none() | st.floats(0.0, 400.0)


class OrderMachine(RuleBasedStateMachine):
    """Conversations with a common beginning; each block that leaves is compared with a search over all free ones."""

    @initialize(num_blocks=st.integers(8, 40))
    def begin(self, num_blocks: int) -> None:
        self.run = Clocked(num_blocks)
        self.lengths = dict.fromkeys("abcd", 0)

    @rule(name=NAMES, grows=st.integers(0, 3), retain_s=st.sampled_from([0.0, *RETENTIONS_S]), next_turn_s=TIMES_S)
    def turn(self, name: str, grows: int, retain_s: float, next_turn_s: float | None) -> None:
        count = self.lengths[name] + grows
        if count <= self.run.pool.num_free:
            self.lengths[name] = count
            self.run.turn(self.chain(name), retain_s, name, next_turn_s)

    @rule(name=NAMES, next_turn_s=st.floats(0.0, 400.0))
    def expect(self, name: str, next_turn_s: float) -> None:
        self.run.pool.expect(name, next_turn_s)

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        self.run.pool.close_session(name)

    @rule(seconds=st.floats(0.1, 400.0))
    def pass_time(self, seconds: float) -> None:
        self.run.now += seconds

    @rule(count=st.integers(1, 12))
    def others(self, count: int) -> None:
        """A prompt that comes once: each of its blocks in turn."""
        pool = self.run.pool
        taken = []
        for _ in range(min(count, pool.num_free)):
            may_go = self.furthest()
            taken += pool.allocate(1)
            assert may_go is None or taken[-1] in may_go
        pool.release(taken)

    def chain(self, name: str) -> list[bytes]:
        return [*chain("common", 2), *chain(name, 40)][: self.lengths[name]]

    def furthest(self) -> set[int] | None:
        """Retained blocks of which one has to go; None where another block goes before."""
        pool, now = self.run.pool, self.run.now
        retained = pool._retained
        free = {block_id for block_id in range(pool.num_blocks) if not pool._num_refs[block_id]}
        if any(pool.hash_of(block_id) is None for block_id in free) or pool._lists.listed(pool._closed):
            return None
        ends = retained._ends
        if any(end <= now for end in ends.values()):
            return {block_id for block_id, end in ends.items() if end == min(ends.values()) or end <= now}
        if len(free) > len(ends):
            return None

        def far_s(block_id: int) -> float:
            sessions = retained._wanted_by[block_id]
            if block_id in unexpected:
                return now - (ends[block_id] - RETENTIONS_S[retained._places[block_id]])
            return min(abs(now - retained._expected[name]) for name in sessions)

        unexpected = [b for b in ends if not all(name in retained._expected for name in retained._wanted_by[b])]
        far = {block_id: far_s(block_id) for block_id in ends}
        # Of those that nobody is expected for, the one whose time ends first stands for the others.
        first_end = min((ends[block_id] for block_id in unexpected), default=0.0)
        chosen = {b: s for b, s in far.items() if b not in unexpected or ends[b] == first_end}
        return {block_id for block_id, s in chosen.items() if s >= max(chosen.values()) - 1e-9}

    @invariant()
    def is_sound(self) -> None:
        self.run.pool.check_integrity()


OrderMachine.TestCase.settings = examples(60, stateful_step_count=40)
TestOrderAgainstSearch = OrderMachine.TestCase
