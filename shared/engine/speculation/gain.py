"""Whether guesses gain time at all: steps with them beside steps without, in turns, by what both took and brought.

Chances and costs of rows say how many guesses a step should have. What that comes to is measured here, with all that it
takes: a small model's step is over before a drafter's own work has paid. Where guesses lose, there are none for a
while, then they are tried again, each time later.
"""

from __future__ import annotations

import statistics

ARM_STEPS = 4
"""Steps of one kind that follow each other in a trial."""
ARMS = (True, False, False, True)
"""Of a trial, with guesses and without: a drift of times meets both alike."""
FIRST_STAY, LONGEST_STAY = 64, 1024
"""Steps between two trials: behind one that says otherwise than those before, and the most that doubling leads to, as
long as they agree."""
KEPT_TRIALS = 5
"""The latest, whose median decides: one of them may have met a busy moment."""
LEAST_GAIN = 1.0
"""Of tokens a second with guesses, beside those without."""


class Gain:
    """Of one kind of guesses, in batches of about one size."""

    def __init__(self) -> None:
        self._left = 0  # steps before the next trial
        self._stay = FIRST_STAY
        self._place = 0  # of the trial's next step
        self._ratios: list[list[float]] = [[], []]  # of this trial, by kind: seconds over predicted seconds
        self._tokens = [0, 0]  # of this trial, by kind, over the sequences
        self._gains: list[float] = []
        self.is_on = True
        """Whether the latest trials say that guesses gain."""

    @property
    def allows(self) -> bool:
        """Whether the next step that is expected to gain by guesses has them."""
        if self._left > 0:
            return self.is_on
        return ARMS[self._place // ARM_STEPS]

    @property
    def is_resting(self) -> bool:
        """Whether no guess is asked for: the latest trials say that they lose, and the next one is not due."""
        return self._left > 0 and not self.is_on

    def passed(self) -> None:
        """A step has ended, whether or not it had guesses."""
        if self._left > 0:
            self._left -= 1

    def measured(self, with_guesses: bool, ratio: float, tokens: float) -> None:
        """A step of the trial that runs, as `allows` said: what it took over what is predicted without guesses, and the
        tokens that it brought over its sequences."""
        if self._left > 0 or with_guesses != ARMS[self._place // ARM_STEPS]:
            return
        self._ratios[with_guesses].append(ratio)
        self._tokens[with_guesses] += tokens
        self._place += 1
        if self._place == ARM_STEPS * len(ARMS):
            self._decide()

    def _decide(self) -> None:
        plain, guessing = (
            tokens / len(ratios) / statistics.median(ratios)
            for tokens, ratios in zip(self._tokens, self._ratios, strict=True)
        )
        self._gains = [*self._gains, guessing / plain][-KEPT_TRIALS:]
        was_on, self.is_on = self.is_on, statistics.median(self._gains) >= LEAST_GAIN
        agrees = was_on == self.is_on == (guessing / plain >= LEAST_GAIN)
        self._stay = min(2 * self._stay, LONGEST_STAY) if agrees else FIRST_STAY
        self._left, self._place = self._stay, 0
        self._ratios, self._tokens = [[], []], [0, 0]
