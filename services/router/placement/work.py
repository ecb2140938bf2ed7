"""The work of computing a prompt, in the two quantities that determine its time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens pass through the projections; in attention each token meets all before it. Pairs grow with the square of
    the length: 40,000 tokens in one prompt take much longer than in forty."""

    tokens: int = 0
    pairs: float = 0.0
    """Pairs of a token to compute and a token that it attends to."""

    @classmethod
    def of(cls, num_uncached: int, num_cached: int) -> Work:
        """The work of a prompt whose first `num_cached` tokens are cached."""
        return cls(num_uncached, num_uncached * (num_cached + num_uncached / 2))

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs)

    def __sub__(self, other: Work) -> Work:
        return Work(self.tokens - other.tokens, self.pairs - other.pairs)


NO_WORK = Work()
