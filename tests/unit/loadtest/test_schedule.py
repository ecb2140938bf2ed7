"""What is sent when: windows, limits, speed, and the traffic's settings."""

from __future__ import annotations

import pytest

from loadtest.config import Traffic
from loadtest.schedule import Limits, Schedule, native_rate, schedule_trace
from loadtest.workloads.spec import parse_workload
from loadtest.workloads.trace import Replay, TraceRequest
from shared.errors import ConfigError

TRACE = Replay([TraceRequest(float(i), 10, 5) for i in range(11)], 1)  # one a second


def plan(spec: str, traffic: Traffic, limits: Limits, seed: int = 1) -> Schedule:
    return traffic.schedule(parse_workload(spec), limits, seed)


def test_a_duration_is_the_window_and_the_offered_rate_is_the_one_asked_for() -> None:
    schedule = plan("fixed", Traffic(rate=7), Limits(duration_s=30))
    assert schedule.window_s == 30
    assert schedule.num_requests == 210
    assert all(0 <= due.at_s < 30 for due in schedule.entries)


def test_a_number_of_requests_ends_the_window_where_the_next_would_come() -> None:
    schedule = plan("fixed", Traffic(arrivals="constant", rate=4), Limits(num_requests=8))
    assert (schedule.num_requests, schedule.window_s, schedule.offered_rate) == (8, 2.0, 4.0)


def test_the_rate_counts_requests_not_conversations() -> None:
    schedule = plan("conversation:turns=5", Traffic(rate=10), Limits(duration_s=40))
    assert len(schedule.entries) == 80
    assert schedule.offered_rate == pytest.approx(10)


def test_a_seed_gives_the_same_requests_at_every_rate() -> None:
    slow = plan("lognormal", Traffic(rate=2), Limits(duration_s=10))
    fast = plan("lognormal", Traffic(rate=4), Limits(duration_s=10))
    assert [d.conversation for d in fast.entries[:20]] == [d.conversation for d in slow.entries]


def test_a_trace_plays_at_its_own_times_divided_by_the_speed() -> None:
    assert native_rate(TRACE, 0) == pytest.approx(1.0)
    schedule = Traffic(speedup=4).schedule(TRACE, Limits(), 0)
    assert [due.at_s for due in schedule.entries[:3]] == [0, 0.25, 0.5]
    assert schedule.offered_rate == pytest.approx(4)


def test_a_rate_sets_the_speed_of_a_trace_and_a_duration_cuts_it() -> None:
    schedule = Traffic(rate=2).schedule(TRACE, Limits(duration_s=3), 0)
    assert [due.at_s for due in schedule.entries] == [0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert schedule.window_s == 3


def test_a_traces_lengths_may_come_as_a_poisson_process() -> None:
    schedule = Traffic(arrivals="poisson", rate=5).schedule(TRACE, Limits(duration_s=2), 0)
    assert schedule.num_requests == 10
    assert [d.conversation.turns[0].num_new_tokens for d in schedule.entries] == [10] * 10


@pytest.mark.parametrize(
    ("traffic", "limits", "field"),
    [
        (Traffic(), Limits(duration_s=5), "rate"),
        (Traffic(rate=3), Limits(), "duration"),
        (Traffic(rate=0), Limits(duration_s=5), "rate"),
        (Traffic(arrivals="trace"), Limits(duration_s=5), "arrivals"),
        (Traffic(rate=1, ramp_to=3), Limits(num_requests=5), "ramp_to"),
        (Traffic(speedup=2), Limits(duration_s=5), "speedup"),
    ],
)
def test_settings_that_are_missing_or_contradict_are_named(traffic: Traffic, limits: Limits, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan("fixed", traffic, limits)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Traffic(concurrency=0), "concurrency"),
        (lambda: Traffic(concurrency=2, rate=1), "concurrency"),
        (lambda: Traffic(arrivals="often"), "arrivals"),  # type: ignore[arg-type]
        (lambda: Traffic(rate=1, speedup=2), "speedup"),
        (lambda: Traffic(arrivals="constant", burstiness=2), "burstiness"),
        (lambda: Limits(duration_s=0), "duration"),
        (lambda: Limits(num_requests=0), "num_requests"),
        (lambda: schedule_trace(TRACE, -1, Limits(), 0), "speedup"),
        (lambda: native_rate(Replay([TraceRequest(0, 1, 1)], 1), 0), "slice"),
    ],
)
def test_values_out_of_bounds_are_named(build: object, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build()  # type: ignore[operator]
    assert raised.value.field == field
