"""Which answers move, and where: bounds, rests and room hold for any fleet; causes begin and end where they should."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.moves import (
    LEAST_LEFT_TOKENS,
    RELIEF_S,
    RESCUE_GAIN,
    REST_S,
    STRAINED_S,
    Desk,
    MoveCause,
    MoveLimits,
    MovePolicy,
    ProposedMove,
    RunningAnswer,
)
from shared.sizing.step_time import StepTimes, StepWork

TIMES = StepTimes(fixed_s=0.001, read_s=0.005, token_s=0.0001, sequence_s=0.002, kv_s=1e-6, attention_s=0.0)
LIMITS = MoveLimits(per_worker=2, per_router=4)


def desk(name: str, num_answers: int = 0, context: int = 0, **fields: object) -> Desk:
    made = Desk(name, StepWork(num_answers, context or 500 * num_answers), num_answers, 16, 400, TIMES)
    return replace(made, **fields)


def answers(worker: str, count: int, **fields: object) -> list[RunningAnswer]:
    made = RunningAnswer("", worker, num_tokens=500, num_blocks=32, num_output_tokens=200, max_left=800)
    return [replace(made, request_id=f"{worker}-{n}", **fields) for n in range(count)]


def proposed(
    policy: MovePolicy,
    desks: Sequence[Desk],
    running: Sequence[RunningAnswer],
    under_way: Sequence[tuple[str, str]] = (),
    now_s: float = 100.0,
    num_groups: int = 1,
) -> list[ProposedMove]:
    return policy.choose(policy.sources(desks, now_s), desks, running, under_way, now_s, num_groups)


def draining(*names: str, others: Sequence[Desk] = ()) -> list[Desk]:
    return [*(desk(name, 4, leaving=MoveCause.DRAIN, accepting=False) for name in names), *others]


# --- what leaves


def test_a_draining_workers_answers_move_those_that_last_longest_first():
    policy = MovePolicy(LIMITS)
    running = [
        *answers("d0", 1, num_output_tokens=100),
        *(replace(each, request_id="long") for each in answers("d0", 1, num_output_tokens=700)),
        *(replace(each, request_id="middle") for each in answers("d0", 1, num_output_tokens=300)),
    ]
    found = proposed(policy, draining("d0", others=[desk("d1"), desk("d2")]), running)
    assert [move.request_id for move in found] == ["long", "middle"]
    assert {move.cause for move in found} == {MoveCause.DRAIN}


def test_nothing_moves_where_nothing_asks_for_it():
    policy = MovePolicy(LIMITS, tpot_target_s=0.1)
    desks = [desk("d0", 4), desk("d1")]
    for now_s in (0.0, 10.0, 20.0):
        assert proposed(policy, desks, answers("d0", 4), now_s=now_s) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"max_left": LEAST_LEFT_TOKENS - 1},
        {"rested_s": REST_S - 0.1},
    ],
)
def test_an_answer_that_ends_soon_or_has_just_moved_stays(fields: dict[str, float]):
    policy = MovePolicy(LIMITS)
    assert proposed(policy, draining("d0", others=[desk("d1")]), answers("d0", 3, **fields)) == []


def test_workers_that_are_wanted_for_prompts_lose_their_answers_only_to_workers_that_hold_the_target():
    wanted = desk("d0", 4, leaving=MoveCause.PREFERENCE)
    full = desk("d1", 12)
    step_s = full.with_answer(500, 32).step_s
    assert step_s is not None
    slow = MovePolicy(LIMITS, tpot_target_s=step_s * 0.99)
    quick = MovePolicy(LIMITS, tpot_target_s=step_s * 1.01)
    assert proposed(slow, [wanted, full], answers("d0", 1)) == []
    assert proposed(quick, [wanted, full], answers("d0", 1)) == [ProposedMove("d0-0", "d1", MoveCause.PREFERENCE)]
    drained = replace(wanted, leaving=MoveCause.DRAIN)
    assert [move.target for move in proposed(slow, [drained, full], answers("d0", 1))] == ["d1"]  # it has to go


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_target_keeps_a_block_of_each_group_for_each_of_its_answers(num_groups: int):
    enough = desk("d1", 10, num_free_blocks=32 + 10 * num_groups)
    scarce = replace(enough, num_free_blocks=enough.num_free_blocks - 1)
    for other, expected in ((enough, ["d1"]), (scarce, [])):
        found = proposed(MovePolicy(LIMITS), draining("d0", others=[other]), answers("d0", 1), num_groups=num_groups)
        assert [move.target for move in found] == expected


def test_what_moves_first_takes_room_from_what_moves_next():
    target = desk("d1", num_free_blocks=3 * 32 - 1)
    found = proposed(
        MovePolicy(MoveLimits(per_worker=4, per_router=4)), draining("d0", others=[target]), answers("d0", 4)
    )
    assert [move.target for move in found] == ["d1", "d1"]


def test_no_answer_moves_to_a_worker_that_loses_its_own():
    policy = MovePolicy(LIMITS)
    vacated = [desk(f"d{n}", 4, leaving=MoveCause.PREFERENCE) for n in range(2)]
    assert proposed(policy, vacated, answers("d0", 4)) == []


# --- rescue


def strained(policy: MovePolicy, desks: Sequence[Desk], running: Sequence[RunningAnswer], until_s: float):
    """Proposals with their times, of looks every tenth of a second."""
    return [
        (tick / 10, move)
        for tick in range(round(until_s * 10) + 1)
        for move in proposed(policy, desks, running, now_s=tick / 10)
    ]


SLOW = desk("d0", 12)
TARGET_S = 0.02


def test_a_worker_too_slow_for_a_while_is_relieved_of_one_answer_at_a_time():
    assert SLOW.step_s is not None
    assert SLOW.step_s > TARGET_S
    policy = MovePolicy(LIMITS, TARGET_S)
    found = strained(policy, [SLOW, desk("d1", 1)], answers("d0", 12), 3 * RELIEF_S)
    times = [at for at, _ in found]
    assert times[0] == STRAINED_S
    assert all(later - earlier >= RELIEF_S for earlier, later in itertools.pairwise(times))
    assert len(times) >= 2
    assert {move.cause for _, move in found} == {MoveCause.RESCUE}


def test_slack_that_is_gone_is_reason_enough_and_slack_that_came_back_is_none():
    late = desk("d0", 6, least_slack_s=-0.01)
    assert late.step_s is not None
    policy = MovePolicy(LIMITS, late.step_s * 1.05)
    assert strained(policy, [late, desk("d1")], answers("d0", 6), 2.0)
    fresh = MovePolicy(LIMITS, late.step_s * 1.05)
    for tick in range(40):
        now = desk("d0", 6, least_slack_s=-0.01 if tick % 5 else 0.01)  # never late for a whole second
        assert proposed(fresh, [now, desk("d1")], answers("d0", 6), now_s=tick / 10) == []


@pytest.mark.parametrize(
    "other",
    [
        desk("d1", 12),  # as slow
        desk("d1", 10),  # not quicker by enough
        desk("d1", 1, times=None),  # promises nothing
        desk("d1", 1, accepting=False),
    ],
)
def test_nobody_is_rescued_to_a_worker_that_is_not_clearly_quicker(other: Desk):
    policy = MovePolicy(LIMITS, TARGET_S)
    assert strained(policy, [SLOW, other], answers("d0", 12), 3.0) == []


def test_without_a_target_or_where_it_is_switched_off_nobody_is_rescued():
    for policy in (MovePolicy(LIMITS), MovePolicy(LIMITS, TARGET_S, rescue=False)):
        assert strained(policy, [SLOW, desk("d1")], answers("d0", 12), 3.0) == []


# --- bounds, for any fleet

causes = st.sampled_from([None, None, MoveCause.DRAIN, MoveCause.PREFERENCE])
desks_of = st.lists(
    st.builds(
        lambda num, free, leaving, accepting, measured, slack: desk(
            "", num, num_free_blocks=free, leaving=leaving, accepting=accepting and leaving is not MoveCause.DRAIN,
            times=TIMES if measured else None, least_slack_s=slack,
        ),
        st.integers(0, 16), st.integers(0, 200), causes, st.booleans(), st.booleans(),
        st.sampled_from([None, -0.1, 0.1]),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip
answer_of = st.tuples(
    st.integers(0, 5),
    st.integers(1, 3000),
    st.integers(1, 900),
    st.integers(0, 900),
    st.sampled_from([0.0, 6.0, math.inf]),
)


@given(
    desks_of,
    st.lists(answer_of, max_size=30),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.01, 0.03]),
    st.integers(1, 3),
)
def test_bounds_rests_and_room_hold_for_any_fleet(made, drawn, pairs, per_worker, per_router, target_s, num_groups):
    desks = [replace(each, name=f"d{number}") for number, each in enumerate(made)]
    by_name = {each.name: each for each in desks}
    running = [
        RunningAnswer(f"r{number}", f"d{worker}", output + 10, -(-(output + 11) // 16), output, left, rested_s)
        for number, (worker, _, output, left, rested_s) in enumerate(drawn)
    ]
    by_id = {answer.request_id: answer for answer in running}
    under_way = [(f"d{a}", f"d{b}") for a, b in pairs if a != b]
    policy = MovePolicy(MoveLimits(per_worker, per_router), target_s)
    policy.sources(desks, 0.0)  # since when they are slow
    sources = policy.sources(desks, STRAINED_S)
    found = policy.choose(sources, desks, running, under_way, STRAINED_S, num_groups)
    busy = Counter(name for pair in under_way for name in pair)
    before = busy.copy()
    taken: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    rescued: Counter[str] = Counter()
    for request_id, target, cause in found:
        answer, at = by_id[request_id], by_name[target]
        busy.update((answer.worker, target))
        taken[target] += 1
        blocks[target] += answer.num_blocks
        assert target != answer.worker
        assert cause is sources[answer.worker]
        assert target not in sources
        assert at.accepting
        assert answer.rested_s >= REST_S
        assert answer.expected_left >= LEAST_LEFT_TOKENS
        if cause is MoveCause.RESCUE:
            rescued[answer.worker] += 1
            after, now = at.with_answer(answer.num_tokens, 0).step_s, by_name[answer.worker].step_s
            assert after is not None
            assert now is not None
            assert after <= min(target_s, RESCUE_GAIN * now)
    assert len({move.request_id for move in found}) == len(found)
    assert len(found) <= max(0, per_router - len(under_way))
    assert all(busy[name] <= max(per_worker, before[name]) for name in busy)
    assert all(by_name[name].num_requests + count <= by_name[name].max_num_seqs for name, count in taken.items())
    for name in blocks:
        assert blocks[name] + by_name[name].num_requests * num_groups <= by_name[name].num_free_blocks
    assert all(count == 1 for count in rescued.values())


@given(st.integers(1, 30), st.integers(2, 6))
def test_a_drained_worker_is_empty_in_the_end_and_no_answer_moved_twice(num_answers, num_workers):
    """Round by round, every move succeeding at once, while there is room elsewhere."""
    policy = MovePolicy(LIMITS)
    where = {f"r{n}": "d0" for n in range(num_answers)}
    moved: Counter[str] = Counter()
    for now in range(num_answers + 1):
        counts = Counter(where.values())
        desks = [
            replace(desk(f"d{n}", counts[f"d{n}"]), max_num_seqs=64, num_free_blocks=4000) for n in range(num_workers)
        ]
        desks[0] = replace(desks[0], leaving=MoveCause.DRAIN, accepting=False)
        running = [
            RunningAnswer(name, worker, 500, 32, 200, 800, rested_s=REST_S if moved[name] else math.inf)
            for name, worker in where.items()
        ]
        for request_id, target, _ in proposed(policy, desks, running, now_s=float(now)):
            where[request_id] = target
            moved[request_id] += 1
    counts = Counter(where.values())
    assert counts["d0"] == 0
    assert set(moved.values()) == {1}
    assert max(counts.values()) - min(counts[f"d{n}"] for n in range(1, num_workers)) <= 2, "they were spread"
