"""A hung engine is seen from its counters; a process that was stopped itself reports no other as hung."""

from __future__ import annotations

import pytest

from services.worker import session
from services.worker.session import EngineProgress
from shared.engine.step_counters import StepCounters


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    return now


def test_an_engine_that_does_not_come_back_is_timed(clock):
    steps = StepCounters(num_steps=4, num_turns=7)
    progress = EngineProgress(steps)
    progress.heartbeat()
    for _ in range(10):
        clock[0] += 0.2
        beat = progress.heartbeat()
    assert beat.has_work
    assert (beat.num_steps, beat.since_turn_s) == (4, pytest.approx(2.0))
    steps.num_turns += 1
    assert progress.heartbeat().since_turn_s == 0.0


def test_an_engine_that_waits_for_a_command_has_no_work(clock):
    progress = EngineProgress(StepCounters(waiting=True))
    clock[0] += 60.0
    beat = progress.heartbeat()
    assert (beat.has_work, beat.since_turn_s) == (False, 0.0)


def test_a_process_that_was_stopped_does_not_blame_its_engine(clock):
    progress = EngineProgress(StepCounters(num_turns=7))
    progress.heartbeat()
    clock[0] += 20.0
    assert progress.heartbeat().since_turn_s == session.MAX_GAP_S


def test_a_step_that_is_to_take_long_is_said_to_while_it_runs(clock):
    steps = StepCounters()
    steps.add(2, 2, 0.2)
    steps.begins(512, predicted_s=17.0)
    assert EngineProgress(steps).heartbeat().longest_step_s == pytest.approx(17.0)
