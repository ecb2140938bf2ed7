"""When requests are due, and which adapter a conversation asks for."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from loadtest.config import LoadConfig, Traffic
from loadtest.schedule import Limits, draw_adapters
from loadtest.workloads.spec import parse_workload
from loadtest.workloads.trace import Replay, TraceRequest
from shared.errors import ConfigError


@pytest.mark.parametrize("skew", [-0.1, 11.0, float("nan")])
def test_a_skew_that_is_none_is_refused_by_name(skew: float) -> None:
    with pytest.raises(ConfigError, match="adapter_skew must be between 0 and 10") as refused:
        LoadConfig("http://a:1", "fixed", None, Traffic(rate=1.0), Limits(), 0, adapters=("a",), adapter_skew=skew)
    assert refused.value.field == "adapter_skew"


def test_adapters_are_drawn_by_zipfs_law_alike_for_one_seed() -> None:
    names = ("a", "b", "c")
    drawn = list(islice(draw_adapters(names, 1.0, 5), 60_000))
    shares = Counter(drawn)
    assert [shares[name] / 60_000 for name in names] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.01)
    assert drawn == list(islice(draw_adapters(names, 1.0, 5), 60_000))
    assert drawn != list(islice(draw_adapters(names, 1.0, 6), 60_000))


def test_a_ramp_down_to_nothing_lasts_as_long_as_it_is_asked_to() -> None:
    fixed = parse_workload("fixed")
    plan = Traffic(rate=2.0, ramp_to=0.0).schedule(fixed, Limits(60.0), 0)
    assert (plan.window_s, 30 < plan.num_requests < 90) == (60.0, True)


def test_a_trace_of_one_request_has_a_window_at_any_arrivals() -> None:
    one = Replay([TraceRequest(0.0, 100, 10)], 512)
    plan = Traffic("poisson", rate=2.0).schedule(one, Limits(), 0)
    assert plan.window_s == 2 * plan.entries[0].at_s > 0


@pytest.mark.parametrize(
    ("field", "given"),
    [
        *(("ramp_to", {"arrivals": kind, "rate": 1.0, "ramp_to": 2.0}) for kind in ("poisson", "constant", "trace")),
        ("burstiness", {"rate": 1.0, "ramp_to": 2.0, "burstiness": 0.5}),
        ("speedup", {"speedup": 0.0}),
    ],
)
def test_what_would_have_no_effect_on_the_arrivals_is_refused_by_name(field: str, given: dict) -> None:
    with pytest.raises(ConfigError) as refused:
        Traffic(**given).schedule(Replay([TraceRequest(0.0, 100, 10)], 512), Limits(10.0), 0)
    assert refused.value.field == field
