"""Arrival processes: increasing offsets from the run's start, in seconds, determined by the random stream.

The processes are endless; a schedule takes the arrivals within its run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

import numpy as np

from shared.errors import ConfigError

_BATCH = 1024


class Arrivals(Protocol):
    """An arrival process."""

    def offsets(self, rng: np.random.Generator) -> Iterator[float]:
        """Endless and non-decreasing. Seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps drawn from a Gamma distribution of mean 1/rate.

    `burstiness` is the distribution's shape, as in vLLM's serving benchmark: 1 is Poisson, below 1 gives bursts, above
    1 approaches constant gaps. The gaps' coefficient of variation is 1/√burstiness.

    With `over_s`, exactly round(rate · over_s) requests arrive before that time and the next one at it: all gaps are
    scaled to fit. A Poisson process stays one, given its count. The offered rate then equals the requested one, which
    makes short runs comparable.
    """

    rate: float  # requests per second
    burstiness: float = 1.0
    over_s: float | None = None

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)
        _check_positive("burstiness", self.burstiness)

    def offsets(self, rng: np.random.Generator) -> Iterator[float]:
        """Cumulative gaps; the first request comes one gap after the start."""
        if self.over_s is None:
            yield from self._running_sum(rng)
            return
        count_within = max(1, round(self.rate * self.over_s))
        within = list(islice(self._running_sum(rng), count_within + 1))
        scale = self.over_s / within[-1]
        latest = math.nextafter(self.over_s, 0.0)  # a last gap may be too small for a float to show
        yield from (min(at_s * scale, latest) for at_s in within[:-1])
        yield self.over_s
        yield from (self.over_s + at_s for at_s in self._running_sum(rng))

    def _running_sum(self, rng: np.random.Generator) -> Iterator[float]:
        at_s = 0.0
        while True:
            for gap in rng.gamma(self.burstiness, 1.0 / (self.rate * self.burstiness), _BATCH):
                at_s += float(gap)
                yield at_s


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every 1/rate seconds, the first immediately."""

    rate: float  # requests per second

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)

    def offsets(self, rng: np.random.Generator) -> Iterator[float]:  # noqa: ARG002 - required by the protocol
        """k/rate for k = 0, 1, …; does not use `rng`."""
        return (k / self.rate for k in count())


@dataclass(frozen=True, slots=True)
class Ramp:
    """A Poisson process whose rate changes linearly from `start_rate` to `end_rate` within `over_s`, then stays."""

    start_rate: float  # requests per second
    end_rate: float  # requests per second
    over_s: float

    def __post_init__(self) -> None:
        for name, rate in (("rate", self.start_rate), ("ramp_to", self.end_rate)):
            if not (0 <= rate < math.inf):
                raise ConfigError(f"{name} must be 0 or more, got {rate:g}", field=name, value=rate)
        if self.start_rate == self.end_rate == 0:
            raise ConfigError("ramp_to must be above 0 if rate is 0", field="ramp_to")
        _check_positive("duration", self.over_s)

    def offsets(self, rng: np.random.Generator) -> Iterator[float]:
        """A unit-rate Poisson process transformed by the inverse of the expected count."""
        expected = 0.0
        while True:
            for step in rng.exponential(1.0, _BATCH):
                expected += float(step)
                yield self._when_expected(expected)

    def _when_expected(self, num_requests: float) -> float:
        """Time by which n requests are expected: solves r₀·t + (r₁-r₀)·t²/2T = n. Infinite = never."""
        slope = (self.end_rate - self.start_rate) / self.over_s
        by_end = (self.start_rate + self.end_rate) / 2 * self.over_s
        if num_requests > by_end:
            return math.inf if self.end_rate == 0 else self.over_s + (num_requests - by_end) / self.end_rate
        # This form of the quadratic formula has no cancellation and does not divide by a slope of 0.
        root = math.sqrt(max(self.start_rate**2 + 2 * slope * num_requests, 0.0))
        return 2 * num_requests / (self.start_rate + root)


def _check_positive(field: str, value: float) -> None:
    if not (0 < value < math.inf):
        raise ConfigError(f"{field} must be above 0, got {value:g}", field=field, value=value)
