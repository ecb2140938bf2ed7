"""Distributions of lengths in tokens, and their syntax:

512            always 512
100-900        uniform, both ends included
512~0.6        log-normal of mean 512; 0.6 is the standard deviation of the logarithm
A@0.7+B@0.3    a weighted mix of any of these
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shared.errors import ConfigError

MAX_LEN = 1 << 20
"""Longest length that is drawn or accepted, tokens."""

_FORMS = "expected 512, 100-900 (uniform), 512~0.6 (log-normal: mean~sigma), or a mix such as 128@0.8+2048@0.2"


class Lengths(Protocol):
    """A distribution of lengths."""

    @property
    def mean(self) -> float:
        """Expected length, tokens."""
        ...

    def draw(self, rng: np.random.Generator) -> int:
        """One length, 1 to MAX_LEN."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant."""

    num_tokens: int

    @property
    def mean(self) -> float:
        """The length."""
        return float(self.num_tokens)

    def draw(self, rng: np.random.Generator) -> int:  # noqa: ARG002 - required by the protocol
        """Does not use `rng`."""
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from `low` to `high` is equally likely."""

    low: int
    high: int

    @property
    def mean(self) -> float:
        """The midpoint."""
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator) -> int:
        """A uniform draw, `low` and `high` included."""
        return int(rng.integers(self.low, self.high, endpoint=True))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Many short, a few very long, as in chat traces."""

    mean: float
    sigma: float

    def draw(self, rng: np.random.Generator) -> int:
        """Rounded to whole tokens."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(max(1, round(float(rng.lognormal(mu, self.sigma)))), MAX_LEN)


@dataclass(frozen=True, slots=True)
class Mix:
    """For each length, one of several distributions, chosen at random by weight."""

    parts: tuple[Lengths, ...]
    weights: tuple[float, ...]  # sum to 1

    @property
    def mean(self) -> float:
        """The weighted mean."""
        return sum(part.mean * weight for part, weight in zip(self.parts, self.weights, strict=True))

    def draw(self, rng: np.random.Generator) -> int:
        """Chooses a part, then draws from it."""
        chosen = int(np.searchsorted(np.cumsum(self.weights), rng.random(), side="right"))
        return self.parts[min(chosen, len(self.parts) - 1)].draw(rng)


def parse_lengths(text: str, field: str) -> Lengths:
    """Reads one of the forms above; raises ConfigError naming `field`."""
    terms = text.split("+")
    if len(terms) == 1 and "@" not in text:
        return _parse_one(text, field)
    parts: list[Lengths] = []
    weights: list[float] = []
    for term in terms:
        form, at, weight = term.partition("@")
        if not at or not re.fullmatch(r"\d*\.?\d+", weight) or float(weight) <= 0:
            raise ConfigError(f"{field}={text}: {term!r} needs a weight above 0; {_FORMS}", field=field, value=text)
        parts.append(_parse_one(form, field))
        weights.append(float(weight))
    total = sum(weights)
    return Mix(tuple(parts), tuple(weight / total for weight in weights))


def _parse_one(text: str, field: str) -> Lengths:
    text = text.strip()
    if match := re.fullmatch(r"(\d+)", text):
        return Fixed(_length(match[1], text, field))
    if match := re.fullmatch(r"(\d+)-(\d+)", text):
        low, high = _length(match[1], text, field), _length(match[2], text, field)
        if low > high:
            raise ConfigError(f"{field}={text}: {low} is above {high}", field=field, value=text)
        return Uniform(low, high)
    if match := re.fullmatch(r"(\d+)~(\d*\.?\d+)", text):
        sigma = float(match[2])
        if not 0 < sigma <= 5:
            raise ConfigError(f"{field}={text}: sigma must be above 0 and at most 5", field=field, value=text)
        return LogNormal(float(_length(match[1], text, field)), sigma)
    raise ConfigError(f"{field}={text}: {_FORMS}", field=field, value=text)


def _length(digits: str, text: str, field: str) -> int:
    value = int(digits)
    if not 1 <= value <= MAX_LEN:
        raise ConfigError(f"{field}={text}: lengths go from 1 to {MAX_LEN} tokens", field=field, value=text)
    return value
