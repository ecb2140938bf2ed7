"""Records for tests."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.clients.base import TargetInfo
from loadtest.config import LoadConfig, Traffic
from loadtest.records import Failure, FailureCause, Reply, RequestRecord, TtftSplit
from loadtest.run import RunResult
from loadtest.schedule import Limits
from loadtest.slo import Slo

SLO = Slo(0.2, 0.03)


def answered(
    index: int = 0,
    *,
    sent_s: float = 0.0,
    times_s: Sequence[float] = (0.1, 0.12),
    counts: Sequence[int] | None = None,
    due_s: float | None = None,
    split: TtftSplit | None = None,
) -> RequestRecord:
    """A complete answer whose messages came at `times_s`."""
    counts = [1] * len(times_s) if counts is None else list(counts)
    reply = Reply(
        sent_s=sent_s,
        token_times_s=list(times_s),
        token_counts=counts,
        closed_s=times_s[-1] + 0.001,
        num_prompt_tokens=100,
        num_output_tokens=sum(counts),
        num_cached_tokens=25,
        split=split,
        finish_reason="length",
    )
    return RequestRecord(index, f"r-{index}", 100, sum(counts), sent_s if due_s is None else due_s, reply=reply)


def broken(index: int = 0, cause: FailureCause = FailureCause.OVERLOADED, sent_s: float = 0.0) -> RequestRecord:
    """A request without a complete answer."""
    reply = Reply(sent_s=sent_s, closed_s=sent_s + 0.05)
    return RequestRecord(index, f"r-{index}", 100, 10, sent_s, reply=reply, failure=Failure(cause, "said so", "Kind"))


def result(
    records: Sequence[RequestRecord], *, slo: Slo | None = SLO, duration_s: float = 12.0, stopped: str = ""
) -> RunResult:
    """A run of a ten-second window."""
    config = LoadConfig(
        target="grpc://h:1",
        workload="fixed",
        slo=slo,
        traffic=Traffic(rate=1.0),
        limits=Limits(duration_s=10),
        seed=5,
    )
    return RunResult(
        config=config,
        target=TargetInfo("m"),
        records=tuple(records),
        started_at="2026-01-01T00:00:00+00:00",
        duration_s=duration_s,
        window_s=10.0,
        planned_requests=len(records),
        ideal_cached_share=None,
        stopped=stopped,
    )
