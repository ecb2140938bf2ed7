"""Maps values to pixels, and places ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to [start, end], linearly or by logarithm."""

    low: float
    high: float
    start: float  # pixels
    end: float
    logarithmic: bool = False

    def __post_init__(self) -> None:
        assert self.high > self.low, (self.low, self.high)
        assert self.low > 0 or not self.logarithmic, self.low

    def __call__(self, value: float) -> float:
        """The pixel of a value; values outside are put on the edge."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the range: steps of 1, 2 or 5 times a power of ten; powers of two by logarithm."""
        if self.logarithmic:
            first, last = math.ceil(math.log2(self.low) - 1e-9), math.floor(math.log2(self.high) + 1e-9)
            return [2.0**k for k in range(first, last + 1, max(1, math.ceil((last - first) / most)))]
        step = round_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest value of 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def round_up(value: float) -> float:
    """A round end of an axis for values up to `value`."""
    if value <= 0:
        return 1.0
    step = round_step(value / 8)
    return math.ceil(value / step - 1e-9) * step


def tick_text(value: float) -> str:
    """A tick's label, without trailing zeros."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"
