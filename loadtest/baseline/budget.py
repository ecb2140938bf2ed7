"""How long a study may take: what is left of its time is shared out among the searches that are still to come."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Budget:
    """All times in seconds on one clock, which the caller reads."""

    ends_s: float
    weights: list[float]
    """How much of the time each search gets, in their order, relative to the others."""
    reserved_s: list[float] = field(default_factory=list)
    """What goes by between searches without a measurement, one entry for each time that it is still to come."""

    def next_deadline(self, now_s: float) -> float:
        """When the next search has to be over. A search that needed less leaves the rest to those behind it."""
        weight = self.weights.pop(0)
        left_s = self.ends_s - now_s - sum(self.reserved_s)
        return now_s + max(left_s, 0.0) * weight / (weight + sum(self.weights))
