"""Placement decisions, their routes and reasons, as `tandem explain` shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import itemgetter
from typing import NamedTuple


class Route(Enum):
    """Where the prompt is computed and why; the values are the metrics' labels."""

    HAND_OFF = "hand_off"
    COLLOCATED = "collocated"
    SHORT_SUFFIX = "short_suffix"
    POOL_SLOWER = "pool_slower"
    NO_PREFILL = "no_prefill"
    SAME_WORKER = "same_worker"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When the decode worker prefills itself. Zero disables a rule."""

    short_suffix_tokens: int = 0
    """Longest uncached suffix, tokens, computed without a hand-off: it hardly lengthens a decode step."""
    max_here_tokens: int = 0
    """Longest suffix, tokens, that a decode worker computes because the prefill pool is slower."""
    gain: float = 2.0
    """The pool's predicted time must be this multiple of the decode worker's: its running batch is delayed too."""

    def route(self, num_uncached_tokens: int, here_s: float | None, pool_s: float | None) -> Route:
        """Takes the predicted TTFT on the decode worker and through the pool; None = unknown, or (pool) no worker."""
        if num_uncached_tokens <= self.short_suffix_tokens:
            return Route.SHORT_SUFFIX
        slower = here_s is not None and pool_s is not None and pool_s > self.gain * here_s
        if num_uncached_tokens <= self.max_here_tokens and slower:
            return Route.POOL_SLOWER
        return Route.HAND_OFF


class Candidate(NamedTuple):
    """One eligible worker."""

    name: str
    score: float
    """Weighted mean of `parts`, in [0, 1]."""
    parts: tuple[tuple[str, float], ...]
    """(scorer, its score in [0, 1])."""
    num_queued_tokens: int
    num_free_blocks: int
    num_requests: int
    num_hit_tokens: int


@dataclass(slots=True, eq=False)
class Ranking:
    """The candidates of a choice, best first, made where they are read: few choices are ever explained."""

    scorers: Sequence[str]
    scores: Sequence[float]
    """Score of each worker."""
    parts: Sequence[tuple[float, ...]]
    """Parts of each worker's score, one for each scorer."""
    workers: Sequence[tuple[str, int, int, int]]
    """Name, queued tokens, free blocks, requests, at the time of the choice."""
    hits: Mapping[str, int]
    """Tokens by worker."""

    def __iter__(self) -> Iterator[Candidate]:
        ranked = sorted(zip(self.scores, self.parts, self.workers, strict=True), key=itemgetter(0), reverse=True)
        for score, parts, (name, num_queued_tokens, num_free_blocks, num_requests) in ranked:
            named, num_hits = tuple(zip(self.scorers, parts, strict=True)), self.hits.get(name, 0)
            yield Candidate(name, score, named, num_queued_tokens, num_free_blocks, num_requests, num_hits)


class Pair(NamedTuple):
    """One candidate."""

    decode: str
    prefill: str
    """Equal to `decode`: the prompt is computed where its answer runs."""
    ttft_s: float
    """Predicted, from now."""
    tpot_s: float
    """Predicted."""
    in_time: float
    """The predicted share of such requests that meet both targets, in [0, 1]."""
    score: float
    """The lowest is taken of pairs that are equal otherwise."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The workers for a request; `prefill` is None if the decode worker prefills."""

    decode: str
    prefill: str | None
    route: Route = field(default=Route.HAND_OFF, compare=False)
    predicted_ttft_s: float | None = field(default=None, compare=False)
    """Seconds from now to the first token; None before enough prompts were seen."""
    decodes: Iterable[Candidate] = field(default=(), compare=False)
    """The eligible decode workers considered, best first."""
    prefills: Iterable[Candidate] = field(default=(), compare=False)
    pairs: tuple[Pair, ...] = field(default=(), compare=False)
    """Where pairs are compared: the best few, the one taken first."""

    @property
    def summary(self) -> Choice:
        """The workers and the route alone, without the candidates."""
        return replace(self, predicted_ttft_s=None, decodes=(), prefills=(), pairs=())


def without_small_gains(pairs: list[Pair], gain: float) -> list[Pair]:
    """The pairs that need no hand-off, unless a hand-off leaves more requests in time than the best of these by over
    `gain`; all of them where each needs one."""
    here = [pair for pair in pairs if pair.decode == pair.prefill]
    if not here:
        return pairs
    enough = max(pair.in_time for pair in here) + gain
    return pairs if any(pair.in_time > enough for pair in pairs) else here
