"""Definitions of the reported metrics, and nothing else.

For one request, at the client, sent at t₀, whose n tokens arrived at t₁ ≤ t₂ ≤ … ≤ tₙ:

    TTFT  t₁ - t₀
    TPOT  (tₙ - t₁) / (n - 1); a request of one token has none
    ITL   each tₖ₊₁ - tₖ: n - 1 values, also where messages carry several tokens (all but the first of such a message
          arrive with a gap of 0), so their sum is always tₙ - t₁
    E2E   tₙ - t₀

n is the number of token ids that the server sent, not the number of messages. If a server sends no ids, n is its usage
count; TTFT, TPOT and E2E are unchanged, and ITL has one value a message (`counts_exact` is False).

A request is **good** if its answer is complete and met the TTFT *and* the TPOT target. Attainment is the share of the
*offered* requests that were good: failed and refused ones are misses. Goodput is good requests per second of the time
over which the requests were offered: attainment times offered rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.records import RequestRecord
from loadtest.rig.measure import percentile
from loadtest.slo import Slo


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The metrics of one complete answer."""

    ttft_s: float
    tpot_s: float | None  # None: one token
    e2e_s: float
    num_output_tokens: int


def request_metrics(record: RequestRecord) -> RequestMetrics | None:
    """The figures of a request; None if its answer is not complete."""
    reply = record.reply
    if record.failure is not None or reply.sent_s is None or not reply.token_times_s:
        return None
    first_s, end_s = reply.token_times_s[0], reply.token_times_s[-1]
    num_tokens = num_output_tokens(record)
    return RequestMetrics(
        ttft_s=first_s - reply.sent_s,
        tpot_s=(end_s - first_s) / (num_tokens - 1) if num_tokens > 1 else None,
        e2e_s=end_s - reply.sent_s,
        num_output_tokens=num_tokens,
    )


def num_output_tokens(record: RequestRecord) -> int:
    """Tokens that arrived, by the server's ids; its usage count if it sends no ids."""
    reply = record.reply
    if reply.counts_exact or reply.num_output_tokens is None:
        return sum(reply.token_counts)
    return reply.num_output_tokens


def inter_token_s(record: RequestRecord) -> list[float]:
    """The gaps between consecutive tokens."""
    reply = record.reply
    gaps: list[float] = []
    for i, (at_s, count) in enumerate(zip(reply.token_times_s, reply.token_counts, strict=True)):
        if i:
            gaps.append(at_s - reply.token_times_s[i - 1])
        gaps += [0.0] * (count - 1)
    return gaps


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of values, in their own unit; percentiles interpolate linearly between neighbours."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """The statistics; None without values."""
    if not values:
        return None
    array, ordered = np.asarray(values, dtype=np.float64), sorted(values)
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
    return Distribution(len(values), float(array.mean()), float(array.std()), p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many requests met the targets."""

    num_good: int
    num_offered: int
    window_s: float  # the time over which they were offered

    @property
    def attainment(self) -> float:
        """Share of the offered requests, in [0, 1]; 0 if none was offered."""
        return self.num_good / self.num_offered if self.num_offered else 0.0

    @property
    def rate(self) -> float:
        """Good requests per second."""
        return self.num_good / self.window_s if self.window_s > 0 else 0.0


def is_good(record: RequestRecord, slo: Slo) -> bool:
    """Whether a request is complete and met its targets."""
    metrics = request_metrics(record)
    return metrics is not None and slo.met(metrics.ttft_s, metrics.tpot_s)


def goodput(records: Sequence[RequestRecord], slo: Slo, window_s: float) -> Goodput:
    """Goodput over all offered requests."""
    offered = [record for record in records if record.offered]
    return Goodput(sum(is_good(record, slo) for record in offered), len(offered), window_s)
