"""The search for the maximum goodput, against systems whose limit is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.rate_search import Point, SearchSpace, highest_at, knee, next_rate


def measure(rate: float, limit: float, fastest: float = float("inf")) -> Point:
    """A system that meets its targets up to `limit`, offered by a generator that manages up to `fastest`."""
    attainment = 1.0 if rate <= limit else (limit / rate) ** 4 * 0.89
    return Point(rate, rate, rate * attainment, attainment, rate <= fastest)


def search(space: SearchSpace, limit: float, fastest: float = float("inf")) -> list[Point]:
    points: list[Point] = []
    while (rate := next_rate(space, points)) is not None:
        assert rate not in [point.rate for point in points], "a rate is never measured twice"
        points.append(measure(rate, limit, fastest))
    return points


@given(limit=st.floats(0.06, 900), start=st.floats(0.1, 500), tolerance=st.floats(0.02, 0.5))
def test_the_limit_is_found_within_the_tolerance(limit: float, start: float, tolerance: float) -> None:
    space = SearchSpace(start_rate=start, tolerance=tolerance, max_points=60)
    best = highest_at(search(space, limit), 0.9)
    assert best is not None
    assert best.rate <= limit
    assert limit / best.rate <= (1 + tolerance) * 1.002 or best.rate == space.max_rate


def test_the_search_stops_after_so_many_points() -> None:
    assert len(search(SearchSpace(max_points=3), limit=700)) == 3


def test_a_generator_at_its_end_stops_the_search_and_is_no_answer() -> None:
    points = search(SearchSpace(start_rate=1.0), limit=1e9, fastest=5)
    assert [point.rate for point in points] == [1, 2, 4, 8]
    best = highest_at(points, 0.9)
    assert best is not None
    assert best.rate == 4


def test_a_stricter_share_gives_a_lower_rate() -> None:
    points = [Point(1, 1, 1, 1.0), Point(2, 2, 1.9, 0.95), Point(4, 4, 2, 0.5)]
    at_90, at_99 = highest_at(points, 0.9), highest_at(points, 0.99)
    assert at_90 is points[1]
    assert at_99 is points[0]


def test_a_lucky_rate_behind_a_miss_is_not_the_answer() -> None:
    points = [Point(1, 1, 1, 1.0), Point(2, 2, 1.6, 0.8), Point(3, 3, 2.9, 0.97)]
    assert highest_at(points, 0.9) is points[0]


def test_the_knee_is_where_goodput_stops_following() -> None:
    curve = [(1, 1), (2, 2), (4, 3.9), (5, 4.2), (8, 3), (16, 1)]
    found = knee([Point(x, x, y, y / x) for x, y in curve])
    assert found is not None
    assert found.rate in (4, 5)
