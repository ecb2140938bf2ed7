"""A client's wishes about its place in the line."""

from __future__ import annotations

import pytest

from services.router.edge.scheduling import SchedulingHints, scheduling_hints
from shared.errors import InvalidRequest


def test_all_of_them_and_none():
    assert scheduling_hints({}) == SchedulingHints("default", 0, "", 0.0)
    headers = {"x-tenant": "gold", "x-priority": "-3", "x-session-id": "s1", "x-ttft-timeout-ms": "1500"}
    assert scheduling_hints(headers) == SchedulingHints("gold", -3, "s1", 1.5)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-tenant", "a b"),
        ("x-session-id", "s" * 129),
        ("x-priority", "high"),
        ("x-priority", "101"),
        ("x-ttft-timeout-ms", "0"),
        ("x-ttft-timeout-ms", "nan"),
        ("x-ttft-timeout-ms", "soon"),
    ],
)
def test_a_bad_one_is_named(header, value):
    with pytest.raises(InvalidRequest) as refused:
        scheduling_hints({header: value})
    assert refused.value.field == header
