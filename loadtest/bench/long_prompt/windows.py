"""Gaps between tokens, by the window in which they ended. Times are seconds of one clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from loadtest.records import Reply
from loadtest.rig.measure import percentile


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
        assert quiet_s, "no tokens arrived"
        assert busy_s, "no tokens arrived"
        return Pair(
            quiet_p50_ms=1e3 * median(quiet_s),
            quiet_p99_ms=1e3 * percentile(quiet_s, 99),
            busy_p50_ms=1e3 * median(busy_s),
            busy_p99_ms=1e3 * percentile(busy_s, 99),
            num_prompts=len(prompt_ttfts_s),
            prompt_ttft_ms=1e3 * median(prompt_ttfts_s),
            neighbour_p99_ms=1e3 * percentile(neighbour_s, 99) if neighbour_s else None,
        )


def median_of(pairs: Iterable[Pair], figure: Callable[[Pair], float | None]) -> float | None:
    """Median over the pairs that have the figure; of a ratio, the median of the pairs' ratios. None without any."""
    known = [value for pair in pairs if (value := figure(pair)) is not None]
    return median(known) if known else None
