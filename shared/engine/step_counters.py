"""What an engine's steps add up to."""

from __future__ import annotations

from dataclasses import dataclass

GROWTH = 4.0
"""A step counts for at most this many times the longest one before it …"""
SHORT_S = 1.0
"""… or for this, which is more in the beginning. Seconds."""


@dataclass(slots=True)
class StepCounters:
    """Sums since start. The engine thread adds; any thread may read."""

    num_steps: int = 0
    busy_s: float = 0.0  # seconds, from result to result while steps follow each other
    num_computed_tokens: int = 0  # token positions that went through the model
    num_output_tokens: int = 0  # sampled and kept
    num_turns: int = 0  # of the engine's loop: it came back for commands
    waiting: bool = False  # it waits for a command, and has nothing to compute
    longest_s: float = 0.0
    """Of the recent steps, by which an engine is judged to hang: each later step lets it decay by 1 %. One step raises
    it by GROWTH at most: else a process that once stood still for 20 s could hang for long, and nobody would notice."""

    def add(self, num_computed_tokens: int, num_output_tokens: int, duration_s: float) -> None:
        """One step."""
        self.num_steps += 1
        self.busy_s += duration_s
        self.longest_s = max(min(duration_s, max(SHORT_S, GROWTH * self.longest_s)), 0.99 * self.longest_s)
        self.num_computed_tokens += num_computed_tokens
        self.num_output_tokens += num_output_tokens
