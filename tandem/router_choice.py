"""Which of several routers is asked next, and how long a client waits before it asks again. No I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence
from threading import Lock

from shared.address import Address
from shared.errors import ConfigError

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
MAX_TARGETS = 64


class Targets:
    """The routers of one client. A client stays with one as long as it answers; clients spread over all of them.

    May be used from several threads.
    """

    def __init__(self, targets: Sequence[str], rng: random.Random) -> None:
        """host:port each, of the routers' gRPC APIs. Raises ConfigError (`targets`)."""
        if isinstance(targets, str) or not 1 <= len(targets) <= MAX_TARGETS:
            raise ConfigError(f"targets must be a list of 1 to {MAX_TARGETS} addresses", field="targets")
        order = list(dict.fromkeys(str(Address.parse(target, "targets", min_port=1)) for target in targets))
        rng.shuffle(order)
        self._lock = Lock()
        self._num_failures = 0
        self._failed_at = dict.fromkeys(order, 0)  # a count of failures, not a time: two never tie
        self.has_answered = False
        """Whether any target has ever answered."""

    @property
    def all(self) -> tuple[str, ...]:
        """Every target, as host:port."""
        return tuple(self._failed_at)

    def choose(self) -> str:
        """The one that answered, else the one whose failure is longest ago."""
        with self._lock:
            return min(self._failed_at, key=self._failed_at.__getitem__)

    def failed(self, target: str) -> None:
        """The target does not answer: the others come first from now on."""
        with self._lock:
            self._num_failures += 1
            self._failed_at[target] = self._num_failures

    def answered(self) -> None:
        """A target did."""
        self.has_answered = True


def pause_s(num_failures: int, rng: random.Random) -> float:
    """Seconds before the next call: none after the first failure in a row, since another router may be there; then
    doubling, with a random half, so that clients of a lost router do not come back together."""
    if num_failures <= 1:
        return FIRST_PAUSE_S * rng.random()
    longest = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_failures, 16))
    return longest * (0.5 + 0.5 * rng.random())
