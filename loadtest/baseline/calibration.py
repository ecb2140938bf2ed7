"""What a study finds out before its first round: targets, capacity, and the best chunk budget of a system."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import ClassVar

import numpy as np

from loadtest.metrics import is_good, request_metrics
from loadtest.rate_search import Point, SearchSpace, highest_at
from loadtest.records import RequestRecord
from loadtest.rig.measure import percentile
from loadtest.slo import Slo
from loadtest.workloads.conversation import Conversation, Workload
from shared.errors import WorkerLost

NUM_REQUESTS = 8
USERS_A_WORKER = 8
"""Users of the closed loop that keeps a system always busy, for each worker."""
BUSY_S = 4.0
IN_TIME = 0.9
"""Share of the requests that meets both targets at the capacity, as in DistServe (Zhong et al., OSDI 2024)."""
_NUM_DRAWN = 64
_TARGET_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A few requests that represent a workload: evenly spread over its prompt lengths, the shortest first.

    The workload's first few requests might have no long prompt, or many.
    """

    workload: Workload
    timed: ClassVar[bool] = False

    @property
    def turns_per_conversation(self) -> float:
        """Turns of a conversation of the workload, in the mean."""
        return self.workload.turns_per_conversation

    def conversations(self, rng: np.random.Generator) -> Iterator[Conversation]:
        """NUM_REQUESTS conversations."""
        drawn = sorted(islice(self.workload.conversations(rng), _NUM_DRAWN), key=_prompt_len)
        for i in range(NUM_REQUESTS):
            yield drawn[int((i + 0.5) / NUM_REQUESTS * len(drawn))]


def targets_from(alone: Sequence[RequestRecord]) -> Slo:
    """Three times the latencies of one request at a time: the longest TTFT, so that long prompts can meet it, and the
    median TPOT. Raises WorkerLost if no request was answered."""
    figures = [metrics for record in alone if (metrics := request_metrics(record)) is not None]
    if not figures:
        raise WorkerLost("no request of the calibration was answered")
    tpots = [m.tpot_s for m in figures if m.tpot_s]  # 0 where all tokens came at once
    tpot_s = _rounded(median(tpots) * _TARGET_FACTOR) if tpots else None
    return Slo(_rounded(max(m.ttft_s for m in figures) * _TARGET_FACTOR), tpot_s)


def busy_rate(busy: Sequence[RequestRecord], duration_s: float) -> float:
    """Requests/s completed by a system that is always busy. Raises WorkerLost if no request was answered."""
    num_done = sum(request_metrics(record) is not None for record in busy)
    if not num_done:
        raise WorkerLost("no request of the calibration was answered")
    return _rounded(num_done / duration_s)


def rates_up_to(busy: float) -> SearchSpace:
    """Where the capacity is looked for: from half the rate of an always busy system, at most at that rate."""
    return SearchSpace(
        start_rate=busy / 2, min_rate=busy / 64, max_rate=busy, attainment=IN_TIME, tolerance=0.15, max_points=8
    )


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate of which a system serves IN_TIME in time."""

    rate: float
    """Requests/s."""
    is_floor: bool = False
    """Whether the generator was late in a window that would have shown more: the capacity is at least the rate."""

    def __str__(self) -> str:
        return f"{'at least ' if self.is_floor else ''}{self.rate:g} req/s"


def capacity_from(points: Sequence[Point]) -> Capacity:
    """The highest rate of which IN_TIME was in time; where no rate was, what was in time at the best of them, or the
    lowest of them."""
    served = highest_at(points, IN_TIME)
    missed = min((point.rate for point in points if point.valid and point.attainment < IN_TIME), default=math.inf)
    above = 0.0 if served is None else served.rate
    is_floor = any(not point.valid and above < point.rate < missed for point in points)
    if served is not None:
        return Capacity(_rounded(served.rate), is_floor)
    return Capacity(_rounded(max(*(point.goodput for point in points), min(point.rate for point in points))), is_floor)


def best_of(tried: Mapping[str, Sequence[RequestRecord]], slo: Slo) -> str:
    """The chunk budget with the most good requests; among equals the one that nine of ten requests met by the most."""

    def quality(chunk: str) -> tuple[int, float]:
        records = tried[chunk]
        return sum(is_good(record, slo) for record in records), -percentile(
            [_share_of_target(record, slo) for record in records], 90
        )

    return max(tried, key=quality)


def _share_of_target(record: RequestRecord, slo: Slo) -> float:
    """The larger of TTFT and TPOT, each over its target; 100 for a request without an answer."""
    metrics = request_metrics(record)
    if metrics is None:
        return 100.0
    pairs = ((metrics.ttft_s, slo.ttft_s), (metrics.tpot_s, slo.tpot_s))
    return min(max((value / target for value, target in pairs if value is not None and target), default=0.0), 100.0)


def _prompt_len(conversation: Conversation) -> int:
    return sum(turn.num_new_tokens for turn in conversation.turns)


def _rounded(value: float) -> float:
    """Rounded to two digits."""
    return float(f"{value:.2g}")
