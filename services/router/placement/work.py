"""How much there is to compute for a prompt, in the two units that its time grows with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens go through the projections; in attention each meets those before it. A long prompt's pairs outgrow its
    tokens: 40,000 tokens in one prompt take much longer than in forty."""

    tokens: int = 0
    pairs: float = 0.0
    """Of a token to compute and one that it attends to."""

    @classmethod
    def of(cls, num_uncached: int, num_cached: int) -> Work:
        """A prompt's whose first `num_cached` tokens need not be computed."""
        return cls(num_uncached, num_uncached * (num_cached + num_uncached / 2))

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs)

    def __sub__(self, other: Work) -> Work:
        return Work(self.tokens - other.tokens, self.pairs - other.pairs)


NO_WORK = Work()
