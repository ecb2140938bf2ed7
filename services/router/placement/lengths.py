"""How long answers are, learnt from those that have ended and those that still run. Plain numbers, no clock.

The ended ones alone mislead: after a start, or where long answers take the place of short ones, the first to end are
the shortest. So lengths are kept as a period life table (Kaplan and Meier's estimate, 1958, by classes of lengths, with
forgetting): of the answers that came to a length, the share that ended before the next one. An answer that runs has
passed some lengths, which counts, and says nothing of those to come.
"""

from __future__ import annotations

from bisect import bisect_left

FIRST_GUESS = 128.0
"""Tokens of an answer, before any has begun; and the fewest that are expected to follow where none got so far yet."""
FORGETTING = 0.01
"""The weight of the newest answer in what is known of a stage, once there were enough of them."""
_OCTAVES = 21
_SHARES = 4
_EXACT = 8


def _bounds() -> list[int]:
    """Each token up to `_EXACT`, then `_SHARES` bounds an octave."""
    bounds = list(range(1, _EXACT + 1))
    while len(bounds) < _EXACT + _SHARES * (_OCTAVES - 3):
        bounds.append(bounds[-_SHARES] * 2)
    return bounds


BOUNDS = tuple(_bounds())
"""A stage of an answer's life is the tokens from behind the bound before to this one, included."""


class Lengths:
    """The life table. Each call but `mean` and `share_longer` takes the same time however much was seen."""

    def __init__(self) -> None:
        self._num_seen = [0] * len(BOUNDS)  # answers that ended in a stage or passed it
        self._ended = [0.0] * len(BOUNDS)  # the share of these that ended there …
        self._tokens = [0.0] * len(BOUNDS)  # … and tokens that they had in it, in the mean of those that ended
        self._num_ended = [0] * len(BOUNDS)
        self._num_inside = [0] * len(BOUNDS)  # running answers that are in a stage
        self._last = -1  # of the stages that any has come to the end of, or ended in
        self._mean: float | None = FIRST_GUESS

    def moved(self, stage: int, num_more: int) -> None:
        """`num_more` further answers are in the stage, or fewer where that is negative."""
        self._num_inside[stage] += num_more
        self._mean = None

    def passed(self, stage: int) -> None:
        """A running answer has all tokens of the stage and has not ended."""
        self._see(stage, 0.0)

    def ended(self, num_tokens: int) -> None:
        """An answer that has passed the stages before has ended."""
        stage = stage_of(num_tokens)
        self._see(stage, 1.0)
        self._num_ended[stage] += 1
        share = max(FORGETTING, 1 / self._num_ended[stage])
        self._tokens[stage] += share * (num_tokens - begin_of(stage) - self._tokens[stage])

    @property
    def mean(self) -> float:
        """Tokens of an answer."""
        if self._mean is None:
            self._mean = self._expected()
        return self._mean

    def share_longer(self, num_tokens: float) -> float:
        """The share of answers that have more than `num_tokens` tokens."""
        left = 1.0
        for stage in range(self._last + 1):
            begin, end = begin_of(stage), BOUNDS[stage]
            if num_tokens < end:
                return left * (1.0 - self._share_ended(stage) * max(0.0, num_tokens - begin) / (end - begin))
            left *= 1.0 - self._share_ended(stage)
        rest = self._rest()
        return left * rest / (rest + max(0.0, num_tokens - begin_of(self._last + 1)))

    def _see(self, stage: int, ended: float) -> None:
        self._num_seen[stage] += 1
        share = max(FORGETTING, 1 / self._num_seen[stage])
        self._ended[stage] += share * (ended - self._ended[stage])
        self._last, self._mean = max(self._last, stage), None

    def _share_ended(self, stage: int) -> float:
        """The share that ended in the stage of those that came to it. Those in it have half of it behind them: where
        few have been through it so far, most of those that will pass it are still there, while some have ended
        already."""
        seen = self._num_seen[stage]
        return self._ended[stage] * seen / (seen + self._num_inside[stage] / 2) if seen else 0.0

    def _expected(self) -> float:
        left, tokens = 1.0, 0.0
        for stage in range(self._last + 1):
            lived, ended = self._through(stage)
            tokens += left * lived
            left *= 1.0 - ended
        return tokens + left * self._rest()

    def _through(self, stage: int) -> tuple[float, float]:
        """(tokens in the stage, in the mean of those that came to it, the share of these that ended there)."""
        ended = self._share_ended(stage)
        return (1.0 - ended) * (BOUNDS[stage] - begin_of(stage)) + ended * self._tokens[stage], ended

    def _rest(self) -> float:
        """Tokens that follow in the mean where no answer has come so far yet: if they end there as often as in the
        octave before; but as many again as there were at the most, or as one has that nothing is known of."""
        left, tokens = 1.0, 0.0
        for stage in range(max(0, self._last + 1 - _SHARES), self._last + 1):
            lived, ended = self._through(stage)
            tokens += left * lived
            left *= 1.0 - ended
        most = max(FIRST_GUESS, begin_of(self._last + 1))
        return min(most, tokens / (1.0 - left)) if left < 1.0 else most


class AnswerLife:
    """How far one answer is, for `Lengths`."""

    __slots__ = ("_lengths", "_stage", "due")

    def __init__(self, lengths: Lengths) -> None:
        """The answer has no tokens yet."""
        self._lengths = lengths
        self._stage = -1
        self.due = 0
        """With more tokens than these `at` has something to count."""

    def at(self, num_tokens: int) -> None:
        """The answer runs, and has `num_tokens` tokens."""
        lengths = self._lengths
        while num_tokens > self.due and self._stage < len(BOUNDS) - 1:
            if self._stage >= 0:
                lengths.passed(self._stage)
                lengths.moved(self._stage, -1)
            self._stage += 1
            lengths.moved(self._stage, 1)
            self.due = BOUNDS[self._stage]

    def ended(self, num_tokens: int) -> None:
        """The answer has ended with `num_tokens` tokens; one without any is not counted."""
        self.at(num_tokens)
        if num_tokens > 0:
            self._lengths.ended(num_tokens)
        self.left()

    def left(self) -> None:
        """Nothing more will be heard of the answer; how long it would have been is not known."""
        if self._stage >= 0:
            self._lengths.moved(self._stage, -1)


def stage_of(num_tokens: int) -> int:
    """The stage in which an answer of `num_tokens` tokens ends."""
    return min(bisect_left(BOUNDS, num_tokens), len(BOUNDS) - 1)


def begin_of(stage: int) -> int:
    """The tokens that an answer has before the stage."""
    return BOUNDS[stage - 1] if stage else 0
