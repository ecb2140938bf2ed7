"""How often guesses were right, by what was known of them before."""

from __future__ import annotations

from collections.abc import Sequence


class Record:
    """Shares of right guesses by class, the newest of which count most."""

    __slots__ = ("_first", "_kept", "_weight", "right", "seen")

    def __init__(self, first: Sequence[float], weight: float, kept: float) -> None:
        """`first`: the chance of a guess of each class before any was seen, which counts as much as `weight`
        observations. `kept`: the weight that an observation has left one later."""
        self._first = first
        self._weight = weight
        self._kept = kept
        self.right = [0.0] * len(first)
        self.seen = [0.0] * len(first)

    def add(self, of_class: int, right: bool) -> None:
        """One guess."""
        self.right[of_class] = self._kept * self.right[of_class] + right
        self.seen[of_class] = self._kept * self.seen[of_class] + 1.0

    def chance(self, of_class: int, first: float | None = None) -> float:
        """Chance that one guess is right; `first`: what is known of it besides."""
        known = self._first[of_class] if first is None else first
        return (self.right[of_class] + self._weight * known) / (self.seen[of_class] + self._weight)
