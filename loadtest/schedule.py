"""The schedule of all requests, fixed before the first one is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.arrivals import Arrivals
from loadtest.workloads.conversation import Conversation, Workload
from shared.errors import ConfigError

FloatArray = NDArray[np.float64]

MAX_REQUESTS = 1_000_000
"""Maximum number of requests of one run."""
_DRAWN_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run stops offering requests; the first limit reached counts."""

    duration_s: float | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise ConfigError(f"duration must be above 0, got {self.duration_s:g}", field="duration")
        if self.num_requests is not None and not 1 <= self.num_requests <= MAX_REQUESTS:
            raise ConfigError(
                f"num_requests must be between 1 and {MAX_REQUESTS}, got {self.num_requests}", field="num_requests"
            )


@dataclass(frozen=True, slots=True)
class Due:
    """A conversation and the time of its first turn."""

    at_s: float  # from the run's start
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class Schedule:
    """An open-loop run's plan."""

    entries: tuple[Due, ...]
    window_s: float
    """The time over which the requests are offered: offered requests / window = offered rate."""

    @property
    def num_requests(self) -> int:
        """All turns of all conversations."""
        return sum(len(due.conversation.turns) for due in self.entries)

    @property
    def offered_rate(self) -> float:
        """Requests per second."""
        return self.num_requests / self.window_s


def streams(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """Independent random streams for arrivals and for the workload: the same seed at another rate sends the same
    requests at other times."""
    return np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])


def draw_adapters(names: Sequence[str], skew: float, seed: int) -> Iterator[str]:
    """A name for each conversation, without end; the n-th in proportion to 1 / n^skew."""
    rng, shares = np.random.default_rng([seed, 4]), zipf_shares(len(names), skew)
    while True:
        yield from (names[place] for place in rng.choice(len(names), _DRAWN_AT_ONCE, p=shares))


def zipf_shares(count: int, exponent: float) -> FloatArray:
    """[count], of a sum of 1: the n-th is in proportion to 1 / n^exponent."""
    weights = np.arange(1, count + 1) ** -exponent
    found: FloatArray = weights / weights.sum()
    return found


def schedule_arrivals(workload: Workload, arrivals: Arrivals, limits: Limits, seed: int) -> Schedule:
    """Conversations at the times of an arrival process; a trace's own times are not used.

    Raises ConfigError (`duration`) if the limits leave no request.
    """
    arrival_rng, workload_rng = streams(seed)
    pairs = zip(arrivals.offsets(arrival_rng), workload.conversations(workload_rng), strict=False)
    return _take((Due(at_s, conversation) for at_s, conversation in pairs), limits)


def schedule_trace(workload: Workload, speedup: float, limits: Limits, seed: int) -> Schedule:
    """Conversations at their own times divided by `speedup`; raises ConfigError (`arrivals`) if they have none."""
    if not workload.timed:
        raise ConfigError("arrivals=trace needs a workload with times of its own", field="arrivals")
    if not 0 < speedup < math.inf:
        raise ConfigError(f"speedup must be above 0, got {speedup:g}", field="speedup")
    _, rng = streams(seed)
    entries = (Due((conversation.at_s or 0.0) / speedup, conversation) for conversation in workload.conversations(rng))
    return _take(entries, limits)


def native_rate(workload: Workload, seed: int) -> float:
    """Requests per second of a timed workload at its own speed; raises ConfigError if all come at once."""
    schedule = schedule_trace(workload, 1.0, Limits(), seed)
    if schedule.entries[-1].at_s <= 0:
        raise ConfigError("all requests of the slice have the same time: it has no rate", field="slice")
    return schedule.offered_rate


def _take(entries: Iterator[Due], limits: Limits) -> Schedule:
    """Entries up to the limits. The window is the duration where entries reach it, else up to the next arrival."""
    chosen: list[Due] = []
    num_requests = 0
    window_s: float | None = None
    for due in entries:
        if limits.duration_s is not None and due.at_s >= limits.duration_s:
            window_s = limits.duration_s
            break
        if num_requests >= (limits.num_requests or MAX_REQUESTS):
            window_s = due.at_s
            break
        chosen.append(due)
        num_requests += len(due.conversation.turns)
    if not chosen:
        raise ConfigError("the run has no request: increase duration or rate", field="duration")
    last_s = chosen[-1].at_s
    if not window_s:
        # The source ended: where the next one would have come, at the mean gap.
        num_gaps = max(1, len(chosen) - 1)  # of one request, the gap before it
        window_s = last_s * (num_gaps + 1) / num_gaps if last_s > 0 else 1.0
    return Schedule(tuple(chosen), window_s)
