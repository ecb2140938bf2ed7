"""Whether a request is worth a hand-off: not for a short suffix, nor when the prefill pool is the slower way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Route(Enum):
    """Where the prompt is computed and why; the values are the metrics' labels."""

    HAND_OFF = "hand_off"
    COLLOCATED = "collocated"
    SHORT_SUFFIX = "short_suffix"
    POOL_SLOWER = "pool_slower"
    NO_PREFILL = "no_prefill"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When the decode worker prefills itself. Zero disables a rule."""

    short_suffix_tokens: int = 0
    """Longest uncached suffix, tokens, computed without a hand-off: it hardly lengthens a decode step."""
    max_here_tokens: int = 0
    """Longest suffix, tokens, that a decode worker computes because the prefill pool is slower."""
    gain: float = 2.0
    """The pool's predicted time must be this multiple of the decode worker's: its running batch is delayed too."""

    def route(self, num_uncached_tokens: int, here_s: float | None, pool_s: float | None) -> Route:
        """Takes the predicted TTFT on the decode worker and through the pool; None = unknown, or (pool) no worker."""
        if num_uncached_tokens <= self.short_suffix_tokens:
            return Route.SHORT_SUFFIX
        slower = here_s is not None and pool_s is not None and pool_s > self.gain * here_s
        if num_uncached_tokens <= self.max_here_tokens and slower:
            return Route.POOL_SLOWER
        return Route.HAND_OFF
