"""An adapter's homes: few, the same for all routers, more at once with its share of the work and fewer slowly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.adapter_sets import GROWS_S, HEADROOM, MAX_ADAPTERS, SHRINKS_S, AdapterSets
from tests.unit.router.placement.builders import pool, view

NAMES = [f"w{number}" for number in range(8)]


def workers(*names: str):
    return pool(*(view(name) for name in names))


def played(sets: AdapterSets, share: float, begin_s: float, end_s: float, rate: float = 40.0) -> None:
    """Requests of equal work, `share` of them of the adapter a."""
    count = 0.0
    for number in range(round((end_s - begin_s) * rate)):
        count += share
        is_own = count >= 1.0
        count -= is_own
        sets.placed("a" if is_own else "", 100, begin_s + number / rate)


def test_homes_are_the_same_for_every_router_whatever_the_order_of_its_workers() -> None:
    first, second = AdapterSets(), AdapterSets()
    for adapter in ("a", "b", "c"):
        assert first.homes(adapter, workers(*NAMES), 0.0) == second.homes(adapter, workers(*NAMES[::-1]), 0.0)
    assert first.homes("a", workers(), 0.0) == ()


@given(st.sets(st.sampled_from(NAMES), min_size=2), st.text("abcdef0123456789", min_size=32, max_size=32))
def test_a_worker_that_goes_moves_only_what_had_its_home_there(names: set[str], adapter: str) -> None:
    fleet, sets = workers(*names), AdapterSets()
    (home,) = sets.homes(adapter, fleet, 0.0)
    gone = sorted(names - {home})[0]
    fleet.remove(gone)
    assert sets.homes(adapter, fleet, 0.0) == (home,)
    fleet.remove(home)
    assert home not in sets.homes(adapter, fleet, 0.0)


def test_many_adapters_are_spread_evenly() -> None:
    fleet, sets = workers(*NAMES), AdapterSets()
    found = [sets.homes(f"{number:032x}", fleet, 0.0)[0] for number in range(800)]
    assert all(60 < found.count(name) < 140 for name in NAMES)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 1.0])
def test_a_set_has_the_size_that_the_share_needs_and_no_more(share: float) -> None:
    sets = AdapterSets()
    played(sets, share, 0.0, 200.0)
    least, most = math.ceil(share * 8 * 0.9), math.ceil(HEADROOM * share * 8)
    assert min(8, least) <= sets.size("a", 8, 200.0) <= min(8, most)


def test_it_grows_within_seconds_and_shrinks_over_minutes() -> None:
    sets = AdapterSets()
    played(sets, 0.0, 0.0, 300.0)
    assert sets.size("a", 8, 300.0) == 1
    played(sets, 0.6, 300.0, 300.0 + 2 * GROWS_S)
    assert sets.size("a", 8, 300.0 + 2 * GROWS_S) >= 5
    played(sets, 0.6, 300.0 + 2 * GROWS_S, 500.0)
    sizes = []
    for number in range(12):
        begin_s = 500.0 + number * SHRINKS_S / 2
        played(sets, 0.0, begin_s, begin_s + SHRINKS_S / 2)
        sizes.append(sets.size("a", 8, begin_s + SHRINKS_S / 2))
    assert sizes[0] >= 3, "half a minute later most of them are still its homes"
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_one_request_in_a_quiet_hour_makes_no_adapter_hot() -> None:
    sets = AdapterSets()
    sets.placed("a", 100, 3600.0)
    assert sets.size("a", 8, 3600.0) == 1


WORK = st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 100_000), st.floats(0.0, 100.0)), max_size=60)


@given(WORK, st.integers(1, 20), st.floats(0.0, 1000.0))
def test_sizes_and_shares_keep_their_bounds_and_a_set_only_gains_from_its_own_work(
    work: list[tuple[str, int, float]], num_workers: int, later_s: float
) -> None:
    sets, now_s = AdapterSets(), 0.0
    for adapter, num_tokens, gap_s in work:
        now_s += gap_s
        sets.placed(adapter, num_tokens, now_s)
    now_s += later_s
    shares = {name: sets.share(name, now_s) for name in ("a", "b", "unknown")}
    assert all(0.0 <= share <= 1.0 for share in shares.values())
    assert shares["unknown"] == 0.0
    for name in shares:
        assert 1 <= sets.size(name, num_workers, now_s) <= num_workers
    sets.placed("b", 1000, now_s)
    assert sets.share("a", now_s) <= shares["a"]


def test_what_is_remembered_is_bounded() -> None:
    fleet, sets = workers("w"), AdapterSets()
    for number in range(MAX_ADAPTERS + 100):
        sets.placed(f"{number:032x}", 100, 1.0)
        sets.homes(f"{number:032x}", fleet, 1.0)
    assert len(sets._own) == len(sets._ranked) == MAX_ADAPTERS
