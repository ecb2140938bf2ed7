"""How many guesses each sequence of a decode step has: as many as make the step's tokens come faster.

Each guess has a chance to become a token, and a row that makes the step longer. Rows go to the likeliest guesses first,
and as many are taken as give the most tokens a second; often none is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.engine.sampling_params import DRAFTERS, Speculation
from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import Draft, Drafter
from shared.engine.speculation.row_costs import RowCosts

MOST_ROWS = 64
"""Guesses of a step, over all sequences."""
LEAST_GAIN = 1.03
"""Of a step's tokens a second, from which on guesses are worth their rows: less is within what is known of both."""
PLAIN_EVERY = 256
"""Steps of which one has no guesses at least, so that its time is known."""


@dataclass(slots=True)
class GuessCounters:
    """Sums since start, by method, of all that there are. The engine thread adds; any thread may read."""

    num_guesses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTERS, 0))
    """Guesses that were computed."""
    num_accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTERS, 0))
    """Of these, those that became tokens."""


class Speculator:
    """Part of the scheduler. Not thread-safe."""

    def __init__(self, drafters: Sequence[Drafter], num_guesses: int | None = None) -> None:
        """`num_guesses`: for each sequence as many as its drafter has, up to this number, whatever they cost; None = as
        many as gain time."""
        self._drafters = drafters
        self._fixed = num_guesses
        self._costs = RowCosts()
        self._methods: dict[str, str] = {}  # of the guesses that are computed now, by sequence
        self._num_guessing = 0  # steps with guesses, since the last one without
        self.counters = GuessCounters()

    @property
    def methods(self) -> frozenset[str]:
        """Of the drafters that it asks."""
        return frozenset(drafter.method for drafter in self._drafters)

    def propose(
        self, sequences: Sequence[EngineSequence], most_rows: int, plain_s: float = 0.0, limit_s: float = math.inf
    ) -> Mapping[str, tuple[int, ...]]:
        """Guesses by sequence, for those that have some, up to `most_rows` in all. Without guesses the step takes
        `plain_s`, with them it may take `limit_s`."""
        drafts: list[tuple[EngineSequence, Draft]] = []
        self._methods.clear()
        for sequence in sequences:
            draft = self._draft(sequence)
            if draft.token_ids:
                drafts.append((sequence, draft))
        if not drafts:
            self._num_guessing = 0
            return {}
        counts = self._counts(
            [draft for _, draft in drafts], len(sequences), min(most_rows, MOST_ROWS), plain_s, limit_s
        )
        found = {
            sequence.sequence_id: draft.token_ids[:count]
            for (sequence, draft), count in zip(drafts, counts, strict=True)
            if count
        }
        self._num_guessing = self._num_guessing + 1 if found else 0
        return found

    def verified(self, sequence_id: str, num_guesses: int, num_accepted: int) -> None:
        """A sequence's guesses were computed, and the first ones were right."""
        method = self._methods.get(sequence_id)
        if method is not None:
            counters = self.counters
            counters.num_guesses[method] = counters.num_guesses.get(method, 0) + num_guesses
            counters.num_accepted[method] = counters.num_accepted.get(method, 0) + num_accepted

    def measured(self, num_sequences: int, num_guesses: int, plain_s: float, step_s: float) -> None:
        """A decode step has ended; `plain_s` is predicted of it without its guesses."""
        if plain_s > 0:
            self._costs.measured(num_sequences, num_guesses, step_s / plain_s)

    def ended(self, sequence_id: str) -> None:
        """The sequence has left."""
        for drafter in self._drafters:
            drafter.forget(sequence_id)

    def _draft(self, sequence: EngineSequence) -> Draft:
        """The best of all drafters: that whose guesses are expected to give the most tokens."""
        choice: Speculation = sequence.sampling.speculation
        most = min(choice.most_guesses, sequence.num_guessable_tokens)
        best, best_tokens = Draft(), 0.0
        if most <= 0:
            return best
        for drafter in self._drafters:
            if not choice.allows(drafter.method):
                continue
            token_ids, chances = drafter.propose(sequence, most)
            draft = Draft(token_ids[:most], chances[:most])
            num_tokens = sum(draft.chances)
            if num_tokens > best_tokens:
                best, best_tokens = draft, num_tokens
                self._methods[sequence.sequence_id] = drafter.method
        return best

    def _counts(
        self, drafts: Sequence[Draft], num_sequences: int, most_rows: int, plain_s: float, limit_s: float
    ) -> list[int]:
        """How many guesses of each draft are computed."""
        counts = [0] * len(drafts)
        if self._fixed is None and self._num_guessing >= PLAIN_EVERY:
            return counts
        rows = [(chance, place) for place, draft in enumerate(drafts) for chance in draft.chances]
        if self._fixed is not None:
            rows = [(1.0, place) for place, draft in enumerate(drafts) for _ in draft.token_ids[: self._fixed]]
            best = min(len(rows), most_rows)
        else:
            rows.sort(reverse=True)
            best = self._best([chance for chance, _ in rows[:most_rows]], num_sequences, plain_s, limit_s)
        for _, place in rows[:best]:
            counts[place] += 1
        return counts

    def _best(self, chances: Sequence[float], num_sequences: int, plain_s: float, limit_s: float) -> int:
        """The number of rows, the likeliest first, with which tokens come fastest."""
        best, best_rate, num_tokens = 0, LEAST_GAIN * num_sequences, float(num_sequences)
        factors = self._costs.factors(num_sequences, len(chances))
        for count, chance in enumerate(chances, 1):
            num_tokens += chance
            if plain_s * factors[count] > limit_s:
                break
            if num_tokens > best_rate * factors[count]:
                best, best_rate = count, num_tokens / factors[count]
        return best
