"""Who is suspected, who is given up, and who is only slow."""

from __future__ import annotations

import pytest

from services.router.workers.liveness import BEATS_TO_SUSPECT, FIRST_STEP_S, Liveness, LivenessLimits
from shared.errors import ConfigError
from shared.rpc.pb.tandem.v1 import types_pb2

LIMITS = LivenessLimits(suspect_after_s=1.0, give_up_after_s=5.0)
WELL = types_pb2.Heartbeat(num_steps=3, has_work=True, since_turn_s=0.01, longest_step_s=0.1)


def after_ticks(count: int) -> Liveness:
    alive = Liveness(LIMITS)
    alive.heard(WELL)
    for _ in range(count):
        alive.tick(LIMITS.interval_s)
    return alive


def test_a_new_session_is_suspected_until_its_first_heartbeat():
    alive = Liveness(LIMITS)
    assert (alive.suspicion, alive.loss) == ("no heartbeat yet", "")
    alive.heard(WELL)
    assert alive.suspicion == ""


def test_silence_is_suspected_after_a_second_and_given_up_after_five():
    assert BEATS_TO_SUSPECT * LIMITS.interval_s == LIMITS.suspect_after_s
    assert after_ticks(4).suspicion == ""
    assert after_ticks(5).suspicion == "no heartbeat for 1.0 s"
    assert after_ticks(24).loss == ""
    assert after_ticks(25).loss == "no heartbeat for 5.0 s"


def test_one_heartbeat_ends_a_suspicion():
    alive = after_ticks(20)
    alive.heard(WELL)
    assert (alive.suspicion, alive.loss) == ("", "")


def test_a_router_that_was_stopped_listens_before_it_judges():
    """What the worker sent meanwhile is not read yet."""
    alive = after_ticks(24)
    alive.tick(30.0)
    assert alive.suspicion == "no heartbeat for 4.0 s"
    for _ in range(4):
        assert alive.loss == ""
        assert alive.has_slept(0.0)
        alive.tick(LIMITS.interval_s)
    assert alive.loss == ""
    alive.tick(LIMITS.interval_s)
    assert alive.loss == "no heartbeat for 5.0 s"
    assert not alive.has_slept(LIMITS.interval_s)


def test_a_late_timer_is_no_pause_and_a_timer_that_never_came_is_one():
    alive = after_ticks(24)
    alive.tick(1.2)
    assert alive.loss
    assert not alive.has_slept(1.2)
    assert alive.has_slept(1.3)


def test_an_engine_that_hangs_is_told_from_a_network_that_does():
    alive = after_ticks(0)
    alive.heard(types_pb2.Heartbeat(num_steps=3, has_work=True, since_turn_s=1.6, longest_step_s=0.1))
    assert "engine" in alive.suspicion
    assert alive.loss == ""
    alive.heard(types_pb2.Heartbeat(num_steps=3, has_work=True, since_turn_s=5.6, longest_step_s=0.1))
    assert "engine" in alive.loss


def test_long_steps_and_a_first_step_that_compiles_are_not_hung():
    alive = after_ticks(0)
    alive.heard(types_pb2.Heartbeat(num_steps=9, has_work=True, since_turn_s=11.0, longest_step_s=3.0))
    assert (alive.suspicion, alive.loss) == ("", "")
    alive.heard(types_pb2.Heartbeat(num_steps=0, has_work=True, since_turn_s=FIRST_STEP_S))
    assert alive.suspicion == ""


def test_an_idle_engine_is_never_hung():
    alive = after_ticks(0)
    alive.heard(types_pb2.Heartbeat(num_steps=3, has_work=False, since_turn_s=900.0))
    assert alive.suspicion == ""


def test_a_router_beats_several_times_before_its_workers_give_it_up():
    assert LIMITS.ticks_a_beat * LIMITS.interval_s == LIMITS.give_up_after_s / BEATS_TO_SUSPECT
    assert LivenessLimits(1.0, 1.0).ticks_a_beat == 1


def test_a_limit_to_give_up_below_the_limit_to_suspect_is_refused():
    with pytest.raises(ConfigError) as refused:
        LivenessLimits(suspect_after_s=2.0, give_up_after_s=1.0)
    assert refused.value.field == "give_up_after_s"
