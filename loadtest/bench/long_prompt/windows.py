"""Gaps between tokens, by the window in which they ended. Times are seconds of one clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from loadtest.metrics import distribution
from loadtest.records import Reply


@dataclass(frozen=True, slots=True)
class Window:
    """The time from `begin_s` to `end_s`."""

    begin_s: float
    end_s: float

    def gaps_s(self, replies: Iterable[Reply]) -> list[float]:
        """The gaps between messages with tokens, over all answers, that are within the window. Seconds."""
        gaps = []
        for reply in replies:
            times = [at_s for at_s in reply.token_times_s if self.begin_s <= at_s <= self.end_s]
            gaps += [later - earlier for earlier, later in pairwise(times)]
        return gaps


@dataclass(frozen=True, slots=True)
class Pair:
    """Measurements without and with long prompts in one batch of answers. Milliseconds."""

    quiet_p50_ms: float
    quiet_p99_ms: float
    busy_p50_ms: float
    busy_p99_ms: float
    num_prompts: int
    """Long prompts that were answered."""
    prompt_ttft_ms: float
    """Their median time to first token."""
    neighbour_p99_ms: float | None = None
    """p99 while a process outside the cluster computed such prompts instead; None if not measured."""

    @property
    def p99_ratio(self) -> float:
        """p99 with long prompts over without: 1.1 is 10 % more."""
        return self.busy_p99_ms / self.quiet_p99_ms

    @property
    def p50_ratio(self) -> float:
        """The same for the medians."""
        return self.busy_p50_ms / self.quiet_p50_ms

    @property
    def p99_over_neighbour(self) -> float | None:
        """p99 with long prompts in the cluster over p99 with the same work outside it."""
        return None if self.neighbour_p99_ms is None else self.busy_p99_ms / self.neighbour_p99_ms

    @staticmethod
    def of(
        quiet_s: Sequence[float],
        busy_s: Sequence[float],
        prompt_ttfts_s: Sequence[float],
        neighbour_s: Sequence[float] | None = None,
    ) -> Pair:
        """Made from the gaps of the windows; each needs at least one, and there must be a long prompt."""
        quiet, busy = distribution(quiet_s), distribution(busy_s)
        assert quiet is not None, "no tokens arrived"
        assert busy is not None, "no tokens arrived"
        ms = 1e3
        ttft_ms = median(prompt_ttfts_s) * ms
        beside = None if neighbour_s is None else distribution(neighbour_s)
        return Pair(
            quiet.p50 * ms, quiet.p99 * ms, busy.p50 * ms, busy.p99 * ms, len(prompt_ttfts_s), ttft_ms,
            None if beside is None else beside.p99 * ms,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Medians:
    """Medians over a system's pairs."""

    quiet_p99_ms: float
    busy_p99_ms: float
    p99_ratio: float
    p50_ratio: float
    prompt_ttft_ms: float
    num_prompts: int
    """Sum over the pairs."""
    neighbour_p99_ms: float | None = None
    p99_over_neighbour: float | None = None

    @staticmethod
    def of(pairs: Sequence[Pair]) -> Medians:
        """Each figure's own median; the ratio is the median of the pairs' ratios."""
        return Medians(
            median(pair.quiet_p99_ms for pair in pairs),
            median(pair.busy_p99_ms for pair in pairs),
            median(pair.p99_ratio for pair in pairs),
            median(pair.p50_ratio for pair in pairs),
            median(pair.prompt_ttft_ms for pair in pairs),
            sum(pair.num_prompts for pair in pairs),
            _median(pair.neighbour_p99_ms for pair in pairs),
            _median(pair.p99_over_neighbour for pair in pairs),
        )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
