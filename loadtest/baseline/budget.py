"""The time budget of a study: its remaining time is divided among the remaining searches."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Budget:
    """A time budget. All times are seconds of the caller's clock."""

    ends_s: float
    weights: list[float]
    """Relative share of the time of each search, in order."""
    reserved_s: list[float] = field(default_factory=list)
    """Time between searches without measurements, one entry for each remaining occurrence."""

    def next_deadline(self, now_s: float) -> float:
        """When the next search has to end. Time that a search did not need goes to the later ones."""
        weight = self.weights.pop(0)
        left_s = self.ends_s - now_s - sum(self.reserved_s)
        return now_s + max(left_s, 0.0) * weight / (weight + sum(self.weights))
