"""Targets and a first rate, from the latencies of one request at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median
from typing import ClassVar

import numpy as np

from loadtest.metrics import request_metrics
from loadtest.records import RequestRecord
from loadtest.slo import Slo
from loadtest.workloads.conversation import Conversation, Workload
from shared.errors import WorkerLost

NUM_REQUESTS = 8
_NUM_DRAWN = 64
_TTFT_FACTOR, _TPOT_FACTOR = 2.0, 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A few requests that represent a workload: evenly spread over its prompt lengths, the shortest first.

    The workload's first few requests might have no long prompt, or many.
    """

    workload: Workload
    timed: ClassVar[bool] = False

    @property
    def turns_per_conversation(self) -> float:
        """That of the workload."""
        return self.workload.turns_per_conversation

    def conversations(self, rng: np.random.Generator) -> Iterator[Conversation]:
        """NUM_REQUESTS conversations."""
        drawn = sorted(islice(self.workload.conversations(rng), _NUM_DRAWN), key=_prompt_len)
        for i in range(NUM_REQUESTS):
            yield drawn[int((i + 0.5) / NUM_REQUESTS * len(drawn))]


@dataclass(frozen=True, slots=True)
class Alone:
    """Latencies of one request at a time on one worker."""

    ttft_s: float  # the longest, so that long prompts can meet it
    tpot_s: float | None  # median; None: answers of one token
    e2e_s: float  # mean

    @staticmethod
    def of(records: Sequence[RequestRecord]) -> Alone:
        """Raises WorkerLost if no request was answered."""
        figures = [metrics for record in records if (metrics := request_metrics(record)) is not None]
        if not figures:
            raise WorkerLost("no request of the calibration was answered")
        tpots = [m.tpot_s for m in figures if m.tpot_s is not None]
        return Alone(
            ttft_s=max(m.ttft_s for m in figures),
            tpot_s=median(tpots) if tpots else None,
            e2e_s=fmean(m.e2e_s for m in figures),
        )

    def slo(self) -> Slo:
        """Targets: twice these latencies."""
        tpot_s = None if self.tpot_s is None else _rounded(self.tpot_s * _TPOT_FACTOR)
        return Slo(_rounded(self.ttft_s * _TTFT_FACTOR), tpot_s)

    def start_rate(self, num_workers: int) -> float:
        """Half of the rate that this many workers would serve without batching. The limit is not far above; the search
        comes from below, because points below the limit take less time than those of an overload."""
        return _rounded(num_workers / self.e2e_s / 2)


def _prompt_len(conversation: Conversation) -> int:
    return sum(turn.num_new_tokens for turn in conversation.turns)


def _rounded(value: float) -> float:
    """Rounded to two digits."""
    return float(f"{value:.2g}")
