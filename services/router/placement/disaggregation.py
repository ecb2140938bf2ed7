"""Whether a request is worth a hand-off: a short suffix, or what a slow prefill pool would hold up, is not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Route(Enum):
    """Where the prompt is computed and why; the values are the metrics' labels."""

    HAND_OFF = "hand_off"
    COLLOCATED = "collocated"
    SHORT_SUFFIX = "short_suffix"
    POOL_SLOWER = "pool_slower"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When the decode worker prefills itself. Zeros: never."""

    short_suffix_tokens: int = 0
    """Longest uncached suffix, tokens, that needs no hand-off: a decode step hardly grows by it."""
    max_here_tokens: int = 0
    """Longest suffix that a decode worker takes because the prefill pool is the slower way."""
    gain: float = 2.0
    """The pool's predicted time must be this multiple of the decode worker's: the others in its batch wait too."""

    def route(self, num_uncached_tokens: int, here_s: float | None, pool_s: float | None) -> Route:
        """`here_s`, `pool_s`: predicted seconds to the first token either way; None = unknown, or (pool) no worker."""
        if num_uncached_tokens <= self.short_suffix_tokens:
            return Route.SHORT_SUFFIX
        slower = here_s is not None and pool_s is not None and pool_s > self.gain * here_s
        if num_uncached_tokens <= self.max_here_tokens and slower:
            return Route.POOL_SLOWER
        return Route.HAND_OFF
