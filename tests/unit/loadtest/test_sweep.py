"""A sweep, and its search for the maximum goodput."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.config import LoadConfig
from loadtest.rate_search import Point, SearchSpace, highest_at, knee, next_rate
from loadtest.run import RunResult
from loadtest.slo import Slo
from loadtest.sweep import Sweep, run_sweep
from shared.errors import ConfigError, WorkerLost
from tests.unit.loadtest.factories import answered, result

CONFIG = result([]).config


class System:
    """Meets the targets up to `limit` requests per second, and one request in two above it."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.asked: list[tuple[float, str, int]] = []
        self.disturbed_once = False
        self.stop_at = float("inf")
        self.gone_at = float("inf")

    async def run(self, config: LoadConfig, folder: str) -> RunResult:
        """A point's result: ten seconds at the rate."""
        rate = config.traffic.rate
        assert rate is not None
        self.asked.append((rate, folder, config.seed))
        if rate >= self.gone_at:
            raise WorkerLost("the target does not serve")
        count = round(10 * rate)
        late_s = 0.5 if self.disturbed_once and rate == 2 and not folder.endswith("again") else 0.0
        slow_s = 0.3 if rate > self.limit else 0.1
        records = [
            answered(i, sent_s=i / rate, times_s=[i / rate + (slow_s if i % 2 else 0.1)], due_s=i / rate - late_s)
            for i in range(count)
        ]
        made = result(records, stopped="stopped by the user" if rate >= self.stop_at else "")
        return replace(made, config=config)


async def sweep(system: System, space: SearchSpace | None = None, rates: tuple[float, ...] = ()) -> Sweep:
    shown: list[Point] = []
    done = await run_sweep(CONFIG, space or SearchSpace(), rates, system.run, lambda _, point: shown.append(point))
    assert shown == done.points
    return done


async def test_the_maximum_goodput_is_found_and_written_down() -> None:
    found = (await sweep(System(limit=5.0))).as_json()
    best = found["max_goodput"]
    assert 4.5 <= best["rate"] <= 5.0
    assert best["goodput"] == pytest.approx(best["offered_rate"])
    assert found["limit_found"]
    assert found["knee"]["rate"] == best["rate"]
    assert [row["rate"] for row in found["points"]] == sorted(row["rate"] for row in found["points"])
    assert found["points"][0]["folder"] == "rate-1"


async def test_a_disturbed_point_is_measured_again_with_other_prompts() -> None:
    system = System(limit=5.0)
    system.disturbed_once = True
    done = await sweep(system)
    at_two = [(folder, seed) for rate, folder, seed in system.asked if rate == 2]
    assert [folder for folder, _ in at_two] == ["rate-2", "rate-2-again"]
    assert at_two[0][1] != at_two[1][1]
    assert all(point.valid for point in done.points)


async def test_a_stopped_point_ends_the_sweep_and_is_no_answer() -> None:
    system = System(limit=100.0)
    system.stop_at = 4
    found = (await sweep(system)).as_json()
    assert [rate for rate, _, _ in system.asked] == [1, 2, 4]
    assert (found["partial"], found["partial_reason"]) == (True, "stopped by the user, at 4 req/s")
    assert [row["rate"] for row in found["points"]] == [1, 2]
    assert found["max_goodput"]["rate"] == 2


async def test_a_target_that_is_gone_ends_the_sweep_unless_it_never_was_there() -> None:
    system = System(limit=100.0)
    system.gone_at = 4
    found = (await sweep(system)).as_json()
    assert (found["partial"], found["partial_reason"]) == (True, "the target does not serve")
    assert found["max_goodput"]["rate"] == 2
    system.gone_at = 0
    with pytest.raises(WorkerLost):
        await sweep(system)


async def test_a_sweep_needs_targets_and_an_open_loop() -> None:
    with pytest.raises(ConfigError, match="needs targets"):
        await run_sweep(replace(CONFIG, slo=None), SearchSpace(), (), System(1).run, lambda *_: None)
    closed = replace(CONFIG, slo=Slo(1), traffic=replace(CONFIG.traffic, rate=None, concurrency=2))
    with pytest.raises(ConfigError, match="varies the rate"):
        await run_sweep(closed, SearchSpace(), (), System(1).run, lambda *_: None)


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


def test_a_bound_of_more_digits_than_a_rate_is_measured_once() -> None:
    up = search(SearchSpace(start_rate=5, max_rate=10.001), limit=1e9)
    assert [point.rate for point in up] == [5, 10]
    down = search(SearchSpace(start_rate=0.8, min_rate=0.30006), limit=0.01)
    assert [point.rate for point in down] == [0.8, 0.4, 0.3001]


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
