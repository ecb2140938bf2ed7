"""Targets as people write them."""

from __future__ import annotations

import pytest

from loadtest.slo import Slo, parse_slo
from loadtest.units import parse_duration_s
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("1.5s", 1.5), (".5 s", 0.5), ("250us", 0.00025), ("2m", 120), ("1H", 3600)]
)
def test_durations_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert parse_duration_s(text, "x") == pytest.approx(seconds)


def test_a_target_without_its_unit_is_refused_with_the_two_ways_to_write_it() -> None:
    with pytest.raises(ConfigError, match=r"ttft=200 has no unit: write ttft=200ms or ttft=200s") as raised:
        parse_slo("ttft=200,tpot=30ms")
    assert raised.value.field == "ttft"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=200min,tpot=3parsec", "unknown unit 'parsec'"),
        ("ttft=fast", "expected a duration"),
        ("ttft:200ms", "expected ttft=200ms,tpot=30ms"),
        ("e2e=3s", "cannot read 'e2e=3s'"),
        ("ttft=1s,ttft=2s", "given twice"),
        ("ttft=0ms", "above 0"),
        ("", "expected ttft=200ms"),
        ("ttft=-5ms", "expected a duration"),
    ],
)
def test_targets_that_cannot_be_read_say_why(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)


def test_both_targets_must_be_met_and_the_limit_itself_is_met() -> None:
    slo = parse_slo("ttft=200ms,tpot=30ms")
    assert slo.met(0.2, 0.03)
    assert not slo.met(0.2001, 0.01)
    assert not slo.met(0.1, 0.0301)
    assert slo.met(0.1, None), "one token has no TPOT that could be missed"


def test_one_target_alone_is_enough() -> None:
    assert parse_slo("tpot=30ms") == Slo(None, 0.03)
    assert parse_slo("tpot=30ms").met(99.0, 0.02)
    assert str(parse_slo("ttft=1.5s,tpot=30ms")) == "TTFT ≤ 1.5 s, TPOT ≤ 30 ms"
