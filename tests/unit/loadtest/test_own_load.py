"""What the generator says of itself."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from loadtest.driver import own_load
from loadtest.driver.own_load import OwnLoad, OwnLoadMeter
from loadtest.summary import invalid_reasons, summarize
from tests.unit.loadtest.factories import answered, result


def test_work_shows_as_a_share_of_a_core() -> None:
    meter = OwnLoadMeter()
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    found = meter.read()
    assert 0 < found.cpu_share <= 1.5
    assert found.waited_share is None or found.waited_share >= 0


def test_waits_and_stolen_time_are_shares_of_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, ticks = iter([10.0, 10.5]), iter([(1000, 40), (1200, 44)])
    now, cpu = iter([100.0, 102.0]), iter([5.0, 5.6])
    monkeypatch.setattr(own_load, "_waited_s", lambda: next(waited))
    monkeypatch.setattr(own_load, "_ticks", lambda: next(ticks))
    monkeypatch.setattr(own_load.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(own_load.time, "process_time", lambda: next(cpu))
    found = OwnLoadMeter().read()
    assert (found.cpu_share, found.waited_share, found.stolen_share) == (pytest.approx(0.3), 0.25, 0.02)
    assert str(found) == "used 30% of a core, waited 25.0% of the time for one, the hypervisor took 2.0%"


def test_where_the_system_does_not_count_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_load, "_waited_s", lambda: None)
    monkeypatch.setattr(own_load, "_ticks", lambda: None)
    found = OwnLoadMeter().read()
    assert (found.waited_share, found.stolen_share) == (None, None)
    assert "waited" not in str(found)


def test_an_invalid_run_says_whether_the_generator_or_the_machine_was_too_slow() -> None:
    late = replace(result([answered(sent_s=1.0, due_s=0.5)]), own_load=OwnLoad(0.2, 0.4, None))
    assert summarize(late)["generator"] == {"cpu_share": 0.2, "waited_share": 0.4, "stolen_share": None}
    assert invalid_reasons(late) == [
        "the generator fell behind its schedule: lag p99 500.0 ms, limit 10 ms "
        "(used 20% of a core, waited 40.0% of the time for one)"
    ]
