"""The last seconds: how many requests were good, and what the others were lost to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.router.admission.blocked import Cause
from services.router.dispatch.record import RequestRecord
from services.router.views.attribution.verdict import Targets, Verdict

DEFAULT_WINDOW_S = 60.0
MAX_WINDOW_S = 3600.0


@dataclass(frozen=True, slots=True)
class CauseShare:
    """One cause within a window."""

    cause: Cause
    num_lost: int
    """Requests lost to it."""
    lost_share: float
    """Share of all requests that count, 0..1."""
    time_share: float
    """Share of all requests' time, 0..1."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; zeros where nothing was measured."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        """Nearest rank."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        last = len(ordered) - 1
        return cls(*(ordered[min(last, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Window:
    """The requests that ended within the last `window_s` seconds."""

    window_s: float
    """Less than was asked for where the ring does not reach so far."""
    targets: Targets
    num_requests: int = 0
    """Requests that count: cancelled ones without a late first token do not."""
    num_good: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft: Percentiles = field(default_factory=Percentiles)
    tpot: Percentiles = field(default_factory=Percentiles)
    causes: tuple[CauseShare, ...] = ()
    """All causes, those that lost most requests first, then by time."""

    @property
    def num_lost(self) -> int:
        """Requests that missed a target, were refused, or failed."""
        return self.num_requests - self.num_good

    @property
    def goodput(self) -> float:
        """Good requests per second."""
        return self.num_good / self.window_s if self.window_s > 0 else 0.0

    @property
    def binding(self) -> Cause | None:
        """The cause that lost most requests; None: none was lost."""
        return self.causes[0].cause if self.num_lost and self.causes else None


def summarize(judged: Sequence[tuple[RequestRecord, Verdict]], targets: Targets, window_s: float) -> Window:
    """A window over requests that ended within it."""
    counted = [(record, verdict) for record, verdict in judged if verdict.counts]
    answered = [(record, verdict) for record, verdict in counted if verdict.ttft_s is not None]
    return Window(
        window_s,
        targets,
        num_requests=len(counted),
        num_good=sum(verdict.lost_to is None for _, verdict in counted),
        num_refused=sum(verdict.missed == "refused" for _, verdict in counted),
        num_failed=sum(verdict.missed == "failed" for _, verdict in counted),
        num_prompt_tokens=sum(record.ask.num_prompt_tokens for record, _ in answered),
        num_cached_tokens=sum(record.num_cached_tokens for record, _ in answered),
        num_output_tokens=sum(record.num_output_tokens for record, _ in judged),
        ttft=Percentiles.of(verdict.ttft_s for _, verdict in answered if verdict.ttft_s is not None),
        tpot=Percentiles.of(verdict.tpot_s for _, verdict in answered if verdict.tpot_s is not None),
        causes=_shares([verdict for _, verdict in counted]),
    )


def _shares(verdicts: Sequence[Verdict]) -> tuple[CauseShare, ...]:
    lost = dict.fromkeys(Cause, 0)
    spent = dict.fromkeys(Cause, 0.0)
    for verdict in verdicts:
        if verdict.lost_to is not None:
            lost[verdict.lost_to] += 1
        for cause, seconds in verdict.parts.items():
            spent[cause] += seconds
    whole, number = sum(spent.values()) or 1.0, len(verdicts) or 1
    shares = [CauseShare(cause, lost[cause], lost[cause] / number, spent[cause] / whole) for cause in Cause]
    return tuple(sorted(shares, key=lambda share: (-share.num_lost, -share.time_share)))
