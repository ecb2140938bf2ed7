"""Whether guessing gains time at all: steps for which drafters are asked beside steps for which they are not, in turns,
by what both took and brought.

Chances and costs of rows say how many guesses a step should have. What that comes to is measured here, with all that it
takes: a small model's step is over before a drafter's own work has paid. Where guessing loses, no drafter is asked for
a while, then it is tried again, each time later.
"""

from __future__ import annotations

import statistics

ARM_STEPS = 4
"""Steps of one kind that follow each other in a trial."""
ARMS = (True, False, False, True)
"""Arms of a round of a trial, asked and not: a drift of times meets both alike."""
MOST_ROUNDS = 4
CLEAR_GAIN = 1.2
"""With which a trial ends after any round; or with its inverse."""
LEAST_GAIN = 0.98
"""Tokens a second with guesses over those without, from which on guesses are made: where they neither gain nor lose
they are made, since the next text may gain."""
FIRST_STAY, LONGEST_STAY = 64, 1024
"""Steps between two trials: behind one that says otherwise than those before, and the most that doubling leads to, as
long as they agree."""
KEPT_TRIALS = 5
"""The latest, whose median decides: one of them may have met a busy moment."""
MOST_OF_MEDIAN = 4.0
"""Times the median of its kind that a step's time counts as at most: what held it up beyond that says nothing of
guesses."""


class Gain:
    """What one kind of drafters gains in batches of about one size."""

    def __init__(self) -> None:
        self.num_left = FIRST_STAY
        """Steps before the next trial."""
        self.is_on = True
        """Whether the latest trials say that guessing does not lose."""
        self._stay = FIRST_STAY
        self._seconds: tuple[list[float], list[float]] = ([], [])  # of this trial's steps, by kind
        self._tokens = [0, 0]  # likewise
        self._gains: list[float] = []

    @property
    def arm(self) -> bool:
        """Whether the next step of the trial asks."""
        return ARMS[self._num_measured // ARM_STEPS % len(ARMS)]

    @property
    def _num_measured(self) -> int:
        return len(self._seconds[0]) + len(self._seconds[1])

    def measured(self, took_s: float, num_tokens: int, asked: bool | None = None) -> None:
        """A step of the trial: what it took, and the tokens that it brought. `asked`: whether it asked, where one was
        planned since; None: as `arm` says. At the trial's end `num_left` is above 0."""
        arm = self.arm if asked is None else asked
        self._seconds[arm].append(took_s)
        self._tokens[arm] += num_tokens
        num_rounds, rest = divmod(self._num_measured, ARM_STEPS * len(ARMS))
        if rest or not all(self._seconds):
            return
        gain = self._rate(True) / self._rate(False)
        if num_rounds >= MOST_ROUNDS or not 1.0 / CLEAR_GAIN < gain < CLEAR_GAIN:
            self._decide(gain)

    def _rate(self, arm: bool) -> float:
        seconds = self._seconds[arm]
        most = MOST_OF_MEDIAN * statistics.median(seconds)
        return self._tokens[arm] / sum([min(took_s, most) for took_s in seconds])

    def _decide(self, gain: float) -> None:
        self._gains = [*self._gains, gain][-KEPT_TRIALS:]
        was_on, self.is_on = self.is_on, statistics.median(self._gains) >= LEAST_GAIN
        agrees = was_on == self.is_on == (gain >= LEAST_GAIN)
        self._stay = min(2 * self._stay, LONGEST_STAY) if agrees else FIRST_STAY
        self.num_left = self._stay
        self._seconds, self._tokens = ([], []), [0, 0]


class Gains:
    """What a draft model gains, and what all other drafters do, in batches of about one size. One trial runs at a
    time."""

    def __init__(self, has_others: bool, has_model: bool) -> None:
        """Whether there are other drafters, and a model."""
        self.others, self.model = Gain(), Gain()
        self._all = (self.others,) * has_others + (self.model,) * has_model
        self._trial: Gain | None = None

    def asks(self, gain: Gain) -> bool:
        """Whether the next step asks those drafters: the model not in the other's trial, where it would take their
        place."""
        if gain is self._trial:
            return gain.arm
        return gain.is_on and (gain is self.others or self._trial is None)

    @property
    def rests(self) -> bool:
        """Whether the next step asks none of them, and no trial is due."""
        return self._trial is None and not any(gain.is_on or not gain.num_left for gain in self._all)

    def ended(self, took_s: float, num_tokens: int, asked: tuple[bool, bool] | None = None) -> None:
        """A step has ended, for which was asked what `asks` says, or `asked`: (others, model). The other arguments are
        those of `Gain.measured`, 0 seconds where they are not known."""
        trial = self._trial
        if trial is not None and took_s > 0:
            trial.measured(took_s, num_tokens, None if asked is None else asked[trial is self.model])
            if trial.num_left:
                self._trial = None
        for gain in self._all:
            if gain.num_left:
                gain.num_left -= 1
            elif self._trial is None:
                self._trial = gain
