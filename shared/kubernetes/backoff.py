"""How long to wait before the next call to an API server that failed: longer each time, and at random."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubles from `first_s` to `most_s` seconds; each pause is between half of that and all of it, so that the
    routers of a cluster do not come back to their API server at one moment."""

    first_s: float = 0.25
    most_s: float = 15.0

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after `failures` in a row, 1 or more."""
        longest = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return longest * random.uniform(0.5, 1.0)
