"""What a run plays: a trace of a file, or a named workload; at the trace's times, or as Poisson arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from loadtest.workloads.azure import read_azure
from loadtest.workloads.lengths import Lengths, LogNormal
from loadtest.workloads.mooncake import read_mooncake
from loadtest.workloads.trace import PACKED, TraceRequest

SPREAD = 0.4
"""Standard deviation of the logarithm of a named workload's lengths."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that share nothing, with answers of a drawn length."""

    prompt_len: Lengths
    output_len: Lengths

    def requests(self, count: int, seed: int) -> list[TraceRequest]:
        """One each second."""
        rng = np.random.default_rng(seed)
        return [
            TraceRequest(float(number), self.prompt_len.draw(rng), self.output_len.draw(rng)) for number in range(count)
        ]


WORKLOADS = {
    "prefill-heavy": Workload(LogNormal(4096, SPREAD), LogNormal(64, SPREAD)),
    "balanced": Workload(LogNormal(1024, SPREAD), LogNormal(300, SPREAD)),
    "short": Workload(LogNormal(200, SPREAD), LogNormal(300, SPREAD)),
    "decode-heavy": Workload(LogNormal(128, SPREAD), LogNormal(1024, SPREAD)),
}


def read_trace(path: Path, unit: str = "") -> list[TraceRequest]:
    """Azure's where the name ends in .csv or .csv.gz, else Mooncake's, whose timestamps' `unit` may be said; raises
    ConfigError with the line's number."""
    return list(read_azure(path) if path.name.removesuffix(PACKED).endswith(".csv") else read_mooncake(path, unit))


def mean_rate(requests: Sequence[TraceRequest]) -> float:
    """Requests/s."""
    return len(requests) / max(requests[-1].at_s - requests[0].at_s, 1e-9)


def poisson(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """The same requests in the same order and at the same mean rate, each at a time that tells nothing of the next."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / mean_rate(requests), len(requests)))
    return [replace(request, at_s=float(at_s)) for request, at_s in zip(requests, times, strict=True)]


def at_rate(requests: Sequence[TraceRequest], rate: float, for_s: float) -> list[TraceRequest]:
    """The first requests, at the mean rate, for that many seconds; again from the beginning, with other
    prompts, where they are too few."""
    wanted = max(2, round(rate * for_s))
    span_s = (requests[-1].at_s - requests[0].at_s) * len(requests) / (len(requests) - 1)
    speedup = rate * span_s / len(requests)
    turns = -(-wanted // len(requests))
    first = min((run for request in requests for run in request.hash_ids), default=0)
    step = max((run for request in requests for run in request.hash_ids), default=0) - first + 1
    repeated = (
        replace(
            request,
            at_s=(request.at_s - requests[0].at_s + turn * span_s) / speedup,
            hash_ids=tuple(run + turn * step for run in request.hash_ids),
        )
        for turn in range(turns)
        for request in requests
    )
    return list(islice(repeated, wanted))
