"""Who is named, and in which order."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.router.picker.router_order import SESSION_SLACK, Endpoint, Refusal, choose

ENDPOINTS = st.lists(
    st.builds(
        Endpoint,
        st.integers(1, 20).map(lambda host: f"10.0.0.{host}:8000"),
        st.booleans(),
        st.booleans(),
        st.integers(0, 50),
    ),
    max_size=8,
    unique_by=lambda endpoint: endpoint.address,
)
SUBSETS = st.none() | st.sets(st.integers(1, 20).map(lambda host: f"10.0.0.{host}:8000"))


def routers(*loads: int) -> list[Endpoint]:
    return [Endpoint(f"10.0.0.{number}:8000", True, False, load) for number, load in enumerate(loads)]


def first(endpoints: list[Endpoint], session: str = "", seed: int = 0) -> str:
    chosen = choose(endpoints, None, session, 1, random.Random(seed))
    assert isinstance(chosen, list)
    return chosen[0].address


@given(ENDPOINTS, SUBSETS, st.sampled_from(["", "tenant/a", "tenant/b"]), st.integers(1, 4), st.integers(0, 9))
def test_only_ready_ones_of_the_subset_that_have_room_are_named(endpoints, subset, session, most, seed) -> None:
    chosen = choose(endpoints, subset, session, most, random.Random(seed))
    allowed = [each for each in endpoints if each.ready and (subset is None or each.address in subset)]
    free = [each for each in allowed if not each.full]
    if not allowed:
        assert chosen is Refusal.NOT_READY
    elif not free:
        assert chosen is Refusal.FULL
    else:
        assert isinstance(chosen, list)
        assert len(chosen) == min(most, len(free)) == len({each.address for each in chosen})
        assert all(each in free for each in chosen)


def test_the_least_loaded_goes_first_and_the_next_ones_follow() -> None:
    chosen = choose(routers(5, 1, 3), None, "", 3, random.Random(0))
    assert isinstance(chosen, list)
    assert [each.load for each in chosen] == [1, 3, 5]


def test_equals_share_the_requests() -> None:
    counts = Counter(first(routers(2, 2, 2), seed=seed) for seed in range(300))
    assert len(counts) == 3
    assert min(counts.values()) > 60


def test_a_session_stays_until_its_router_has_far_more_to_do() -> None:
    home = first(routers(0, 0, 0), "tenant/a")
    for load in range(SESSION_SLACK + 1):
        loaded = routers(0, 0, 0)
        for each in loaded:
            each.load = load if each.address == home else 0
        assert first(loaded, "tenant/a") == home
    overloaded = routers(0, 0, 0)
    for each in overloaded:
        each.load = 100 if each.address == home else 0
    assert first(overloaded, "tenant/a") != home


def test_sessions_spread_and_keep_their_router_when_another_one_goes() -> None:
    sessions = [f"tenant/{number}" for number in range(200)]
    before = {session: first(routers(0, 0, 0, 0), session) for session in sessions}
    assert min(Counter(before.values()).values()) > 20
    for session in sessions:
        left = routers(0, 0, 0)
        if before[session] in {each.address for each in left}:
            assert first(left, session) == before[session]


def test_a_full_home_sends_its_session_elsewhere() -> None:
    endpoints = routers(0, 0)
    home = first(endpoints, "tenant/a")
    for each in endpoints:
        each.full = each.address == home
    assert first(endpoints, "tenant/a") != home
