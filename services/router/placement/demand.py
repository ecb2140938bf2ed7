"""What arrives, and how long answers are: the demand that a split of the workers has to serve. Plain data, no clock."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from services.router.placement.lengths import AnswerLife, Lengths
from services.router.placement.views import Work

WINDOW_S = 10.0
"""Demand is a running mean in which an arrival of this age weighs 1/e."""
NEWEST = 512
"""Arrivals by which what is unlike the mean is known."""
SAMPLE = 32
"""Prompts by whose lengths is known how many are in time."""
SHARES = (1.0, 0.98, 0.95, 0.9, 0.8, 0.65, 0.5, 0.3, 0.1)
"""Shares of the requests, the cheapest ones, that are looked at by themselves."""


@dataclass(frozen=True, slots=True)
class Mix:
    """The mean request and the rate of arrivals."""

    rate: float
    """Requests a second."""
    prompt: Work
    """What a request has to compute of its prompt."""
    num_prompt_tokens: float
    """Tokens of a prompt, cached ones included."""
    output_len: float
    """Tokens of an answer."""
    prompt_lens: tuple[int, ...] = ()
    """Tokens to compute of some of the prompts, ascending; empty: each is the mean one."""
    num_seen: float = math.inf
    """Requests that the means are of."""

    @property
    def context_len(self) -> float:
        """Tokens of a running answer with its prompt, in the mean over its life."""
        return self.num_prompt_tokens + self.output_len / 2

    @property
    def tokens_s(self) -> float:
        """Tokens of prompts to compute, a second."""
        return max(1e-9, self.rate * self.prompt.tokens)

    @property
    def lens(self) -> tuple[int, ...]:
        """`prompt_lens`, or the mean prompt's."""
        return self.prompt_lens or (self.prompt.tokens,)

    @property
    def prompt_error(self) -> float:
        """Standard error of the mean prompt, relative to it: of few requests that are unlike the mean says little."""
        lens = self.lens
        mean = sum(lens) / len(lens)
        variance = sum([(num - mean) ** 2 for num in lens]) / len(lens)
        return math.sqrt(variance / max(1.0, self.num_seen)) / mean

    def cut(self, most: float, part: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The prompts of at most `most` tokens to compute, longer ones left out, in two groups: (the shorter ones, the
        longer ones, which have the share `part` of the tokens of both)."""
        lens = self.lens[: bisect_right(self.lens, most)]
        first, left = len(lens), part * sum(lens)
        while first and left > 0:
            first -= 1
            left -= lens[first]
        return lens[:first], lens[first:]


class Demand:
    """Running means, and the newest ones one by one. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._at_s = -math.inf
        self._begin_s = math.inf
        self._count = self._tokens = self._pairs = self._context = 0.0
        self._prompt: Work | None = None
        self.num_arrived = 0
        self._lengths = Lengths()
        self._newest: deque[tuple[Work, int]] = deque(maxlen=NEWEST)

    def arrived(self, own: Work, num_tokens: int, now_s: float) -> None:
        """A request of `num_tokens`, of which `own` is to be computed."""
        self._decay(now_s)
        self._begin_s = min(self._begin_s, now_s)
        self.num_arrived += 1
        self._prompt = None
        self._count += 1
        self._tokens += own.tokens
        self._pairs += own.pairs
        self._context += num_tokens
        self._newest.append((own, num_tokens))

    def begin(self) -> AnswerLife:
        """Begins an answer, which the caller keeps up to date: by those that run and have ended the next are judged."""
        return AnswerLife(self._lengths)

    def mix(self, now_s: float) -> Mix:
        """The mix of all requests that arrive."""
        rate, lens = self.rate(now_s), _some_lens(self._newest)
        context = self._context / max(self._count, 1e-9)
        return Mix(rate, self.prompt, context, self.output_len, lens, self._count)

    def cheapest(self, now_s: float, cost: Callable[[Work], float]) -> Sequence[tuple[float, Mix]]:
        """(share of the requests, what these are), from all of them down: the ones whose prompts cost the least, of
        those that cost the least any. Where not all can be served in time, admission refuses the longest first."""
        mix = self.mix(now_s)
        found = [(1.0, mix)]
        costs = sorted(((cost(own), own, num_tokens) for own, num_tokens in self._newest), key=itemgetter(0))
        ordered = [(own, num_tokens) for _, own, num_tokens in costs]
        count = len(ordered)
        if not count:
            return found
        total, least = _mean(ordered), costs[0][0]
        num_alike = bisect_right(costs, least, key=itemgetter(0))  # none of these is refused rather than another
        for share in SHARES[1:]:
            kept = ordered[: max(num_alike, round(share * count))]
            tokens, pairs, context = (part / max(whole, 1e-9) for part, whole in zip(_mean(kept), total, strict=True))
            prompt = Work(max(1, round(tokens * mix.prompt.tokens)), pairs * mix.prompt.pairs)
            context *= mix.num_prompt_tokens
            lens, num_seen = _some_lens(kept), share * mix.num_seen
            found.append((share, Mix(share * mix.rate, prompt, context, mix.output_len, lens, num_seen)))
        return found

    def rate(self, now_s: float) -> float:
        """Requests a second."""
        self._decay(now_s)
        seen_s = WINDOW_S * -math.expm1(-max(1.0, now_s - self._begin_s) / WINDOW_S)
        return self._count / seen_s

    @property
    def prompt(self) -> Work:
        """What a request has to compute in the mean."""
        if self._prompt is None:  # it does not change as the counts fade
            count = max(self._count, 1e-9)
            self._prompt = Work(max(1, round(self._tokens / count)), self._pairs / count)
        return self._prompt

    @property
    def output_len(self) -> float:
        """Tokens of an answer, in the mean."""
        return self._lengths.mean

    @property
    def num_gaps(self) -> float:
        """Between the tokens of an answer, in the mean: what its TPOT divides by; at least one."""
        return max(1.0, self.output_len - 1.0)

    @property
    def context_len(self) -> float:
        """Tokens of a running answer with its prompt, in the mean over its life."""
        return self._context / max(self._count, 1e-9) + self.output_len / 2

    def share_with_gaps(self, num_gaps: float) -> float:
        """The share of the answers with at least `num_gaps` gaps between their tokens; of one token: all such, for
        without a second token there is no gap to be late by."""
        if num_gaps <= 1.0:
            return 1.0
        alone = 1.0 - self._lengths.share_longer(1)
        return alone + self._lengths.share_longer(num_gaps)

    def _decay(self, now_s: float) -> None:
        if now_s > self._at_s:
            kept = math.exp((self._at_s - now_s) / WINDOW_S)
            self._count, self._tokens = kept * self._count, kept * self._tokens
            self._pairs, self._context = kept * self._pairs, kept * self._context
            self._at_s = now_s


class SteadyDemand(Demand):
    """A demand that is the same at all times."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self._mix = mix

    @property
    def output_len(self) -> float:
        """See `Demand`."""
        return self._mix.output_len

    def mix(self, now_s: float) -> Mix:  # noqa: ARG002 - the same at all times
        """See `Demand`."""
        return self._mix


def _some_lens(entries: Sequence[tuple[Work, int]]) -> tuple[int, ...]:
    """At most SAMPLE of the prompts' tokens to compute, evenly by rank."""
    lens = sorted(max(1, own.tokens) for own, _ in entries)
    count = min(SAMPLE, len(lens))
    return tuple(lens[(2 * number + 1) * len(lens) // (2 * count)] for number in range(count))


def _mean(entries: Sequence[tuple[Work, int]]) -> tuple[float, float, float]:
    """(tokens to compute, pairs, tokens) of a request."""
    count = len(entries)
    return (
        sum(own.tokens for own, _ in entries) / count,
        sum(own.pairs for own, _ in entries) / count,
        sum(num_tokens for _, num_tokens in entries) / count,
    )
