"""Whether the engine's thread still turns, as the event loop sees it."""

from __future__ import annotations

import time

from shared.engine.step_counters import StepCounters
from shared.rpc.pb.tandem.v1 import types_pb2

MAX_GAP_S = 0.5
"""Most that one look adds: a process that was itself stopped for a while does not blame its engine. Seconds."""


class EngineProgress:
    """Looks at the engine's counters at each heartbeat; the engine's thread does nothing for it."""

    def __init__(self, steps: StepCounters) -> None:
        """`steps`: the engine's own, which its thread changes."""
        self._steps = steps
        self._num_turns = -1
        self._looked_at = time.monotonic()
        self._since_turn_s = 0.0

    def heartbeat(self) -> types_pb2.Heartbeat:
        """A heartbeat: the engine's steps so far, whether it has work, and seconds since its last progress."""
        steps, now = self._steps, time.monotonic()
        gap_s, self._looked_at = now - self._looked_at, now
        if steps.waiting or steps.num_turns != self._num_turns:
            self._num_turns = steps.num_turns
            self._since_turn_s = 0.0
        else:
            self._since_turn_s += min(gap_s, MAX_GAP_S)
        return types_pb2.Heartbeat(
            num_steps=steps.num_steps,
            has_work=not steps.waiting,
            since_turn_s=self._since_turn_s,
            longest_step_s=steps.longest_s,
        )
