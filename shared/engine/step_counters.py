"""What an engine's steps add up to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepCounters:
    """Sums since start. The engine thread adds; any thread may read."""

    num_steps: int = 0
    busy_s: float = 0.0  # seconds, from result to result while steps follow each other
    num_computed_tokens: int = 0  # token positions that went through the model
    num_output_tokens: int = 0  # sampled and kept

    def add(self, num_computed_tokens: int, num_output_tokens: int, duration_s: float) -> None:
        """One step."""
        self.num_steps += 1
        self.busy_s += duration_s
        self.num_computed_tokens += num_computed_tokens
        self.num_output_tokens += num_output_tokens
