"""What a worker's heartbeats say: alive, suspected, or lost; and whether its network or its engine has stopped.

Silence is counted in ticks of the router's own timer, not in seconds: a router that was itself stopped for a while has
missed one tick. After that it listens before it judges: what came meanwhile lies unread, and gRPC may have ended
connections whose pings were not answered meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.errors import ConfigError
from shared.rpc.pb.tandem.v1 import types_pb2

BEATS_TO_SUSPECT = 5
"""Heartbeats that must fail to come before a worker is suspected."""
STEPS_OF_GRACE = 4.0
"""A step may take this many times the longest recent one, beyond the limits, before the engine counts as hung."""
FIRST_STEP_S = 60.0
"""Allowed in place of it before the first step: kernels may be compiled in there. Seconds."""


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Seconds of silence, or of an engine that does not come back from a step."""

    suspect_after_s: float = 1.0
    """No new work from then on."""
    give_up_after_s: float = 5.0
    """The session is ended, and its requests go elsewhere. A shorter stall is only a pause."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a worker would be given up before it is suspected."""
        if self.give_up_after_s < self.suspect_after_s:
            raise ConfigError(
                f"give_up_after_s {self.give_up_after_s:g} is below suspect_after_s {self.suspect_after_s:g}",
                field="give_up_after_s",
                limit=self.suspect_after_s,
            )

    @property
    def interval_s(self) -> float:
        """Between two heartbeats of a worker, and two ticks here."""
        return self.suspect_after_s / BEATS_TO_SUSPECT

    @property
    def ticks_a_beat(self) -> int:
        """Ticks between two heartbeats of the router: a worker has no suspected state, it only gives up."""
        return max(1, round(self.give_up_after_s / BEATS_TO_SUSPECT / self.interval_s))


class Liveness:
    """One session's heartbeats. Suspected until the first one: a worker that hangs is not trusted for connecting."""

    def __init__(self, limits: LivenessLimits) -> None:
        self._limits = limits
        self._silent_s = 0.0
        self._stuck_s = 0.0
        self._awake_s = math.inf  # since this router was itself stopped
        self._has_begun = False

    def heard(self, beat: types_pb2.Heartbeat) -> None:
        """A heartbeat came."""
        self._has_begun = True
        self._silent_s = 0.0
        allowed_s = STEPS_OF_GRACE * beat.longest_step_s if beat.num_steps else FIRST_STEP_S
        self._stuck_s = max(0.0, beat.since_turn_s - allowed_s) if beat.has_work else 0.0

    def tick(self, passed_s: float) -> None:
        """An interval has gone by, or `passed_s` seconds where the timer was late."""
        limits = self._limits
        self._silent_s += limits.interval_s
        self._awake_s += limits.interval_s
        if self._is_pause(passed_s):
            self._awake_s = 0.0
            self._silent_s = min(self._silent_s, limits.give_up_after_s - limits.suspect_after_s)

    def has_slept(self, since_tick_s: float) -> bool:
        """Whether this router was itself stopped within `suspect_after_s`; the last tick was `since_tick_s` ago."""
        return self._awake_s < self._limits.suspect_after_s or self._is_pause(since_tick_s)

    def _is_pause(self, passed_s: float) -> bool:
        """Whether a timer of one interval was so late that this router must have been stopped."""
        return passed_s > self._limits.interval_s + self._limits.suspect_after_s

    @property
    def suspicion(self) -> str:
        """Why it should get no new work; empty while it is well."""
        return self._beyond(self._limits.suspect_after_s) or ("" if self._has_begun else "no heartbeat yet")

    @property
    def loss(self) -> str:
        """Why it is given up; empty while it is not."""
        return self._beyond(self._limits.give_up_after_s)

    def _beyond(self, limit_s: float) -> str:
        if self._silent_s > limit_s - self._limits.interval_s / 2:
            return f"no heartbeat for {self._silent_s:.1f} s"
        if self._stuck_s > limit_s:
            return f"its engine has not come back from a step for {self._stuck_s:.1f} s more than expected"
        return ""
