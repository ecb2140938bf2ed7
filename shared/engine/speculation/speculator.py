"""How many guesses each sequence of a decode step has: as many as make the step's tokens come faster.

Each guess has a chance to become a token, and a row that makes the step longer. Rows go to the likeliest guesses first,
and as many are taken as give the most tokens a second; often none is.

A draft model's guesses take time before the step, too (`model_rounds`).

What is expected is then held to what comes of it: where steps that ask drafters bring fewer tokens for all the time
that they take than steps that do not (`gain`), none is asked for a while. The draft model and all others are held to
that apart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.engine.sampling_params import DRAFTERS, MOST_GUESSES
from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import NO_DRAFT, Draft, Drafter, most_guesses
from shared.engine.speculation.gain import Gains
from shared.engine.speculation.guessing_model import GuessingModel
from shared.engine.speculation.model_rounds import ModelRounds
from shared.engine.speculation.row_costs import GuessedStep, RowCosts

MOST_ROWS = 64
"""Guesses of a step, over all sequences."""
PLAIN_EVERY = 256
"""Steps of which one has no guesses at least, so that its time is known; where steps are planned ahead two in a row,
since the first one is not."""
MOST_AWAITING = 64
"""Answers up to which a step in flight may be waited for: in larger batches asking drafters takes a millisecond and
more of each step, and the rows that a step may have for guesses gain little."""


@dataclass(slots=True)
class GuessCounters:
    """Sums since start, by method, of all that there are. The engine thread adds; any thread may read."""

    num_guesses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTERS, 0))
    """Guesses that were computed."""
    num_accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTERS, 0))
    """Guesses of these that became tokens."""
    drafting_s: float = 0.0
    """Seconds that a draft model computed."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a step with guesses is expected to be like."""

    tokens_each: float
    """Tokens that it brings each of its sequences, in the mean."""
    took_s: float
    """Seconds, a draft model's included."""


NOTHING_EXPECTED = Expected(1.0, math.inf)
"""The expectation of guesses that are made whatever they cost."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is to be learned from a planned step."""

    gains: Gains | None  # None: nothing
    asks: tuple[bool, bool]  # other drafters, and the model
    num_sequences: int
    is_first: bool
    has_waited: bool  # the device had nothing to do when it was planned, since guesses were waited for


class Speculator:
    """Part of the scheduler. Not thread-safe."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        num_guesses: int | None = None,
        model: GuessingModel | None = None,
        processor_clock: Callable[[], float] | None = None,
    ) -> None:
        """`num_guesses`: for each sequence as many as its drafter has, up to this number, whatever they cost; None = as
        many as gain time. `model`: asked besides. `processor_clock`: the calling thread's processor time in seconds,
        which says more than a step's time of what guessing gains, where steps are computed by processors that others
        use, too; None: what steps took."""
        self._drafters = drafters
        self._fixed = num_guesses
        self._model = model
        self._rounds = None if model is None else ModelRounds(model, num_guesses)
        self._costs = RowCosts()
        self._methods: dict[str, str] = {}  # of the guesses that are computed now, by sequence
        self._gains: dict[int, Gains] = {}  # by the size of a batch
        self._of_step: Gains | None = None  # of the present step
        self.is_resting = False
        """Whether none is asked for the present step: then nothing is learned from it."""
        self._asks = False  # other drafters, for the present step
        self._asks_model = False  # likewise
        self._is_first = False  # of those that ask a head
        self._num_sequences = 0  # of it
        self._num_right = 0  # of its guesses
        self._clock = processor_clock
        self._begun_s = 0.0  # on that clock
        self._planned: deque[_Planned] = deque()  # steps that are not completed
        self._took_s = 0.0  # 0: not known
        self._num_guessing = (
            0  # steps with guesses, since the last one without; below 0: the next one has none, if ahead
        )
        self.expected = NOTHING_EXPECTED
        """The expectation of the step whose guesses were proposed last."""
        self.counters = GuessCounters()

    @property
    def methods(self) -> frozenset[str]:
        """Methods of the drafters that it asks."""
        drafters = [drafter.method for drafter in self._drafters]
        return frozenset(drafters if self._model is None else [*drafters, self._model.method])

    @property
    def follows_steps(self) -> bool:
        """Whether the present step is to give what a head guesses with: not where it is not asked, in a trial's steps
        without guesses least of all, which would seem as long as those with."""
        return self._asks_model and self._model is not None and self._model.follows_steps

    def num_written_ahead(self, sequence: EngineSequence) -> int:
        """Tokens behind its newest one that are guessed in the sequence's blocks, before a step computes any."""
        model, rounds = self._model, self._rounds
        if model is None or rounds is None or not model.writes_ahead or not rounds.may_ask(sequence):
            return 0
        return rounds.most(sequence)

    def needs_times(self, plain_s: float) -> bool:
        """Whether a step is to have no guesses because it is not known yet how long steps take, `plain_s` being 0:
        where they are planned ahead, steps with guesses, and those right behind them, do not tell."""
        return self._clock is None and self._fixed is None and plain_s <= 0

    def propose(
        self, sequences: Sequence[EngineSequence], most_rows: int, plain_s: float = 0.0, limit_s: float = math.inf
    ) -> Mapping[str, tuple[int, ...]]:
        """Guesses by sequence, for those that have some, up to `most_rows` in all. Without guesses the step takes
        `plain_s`, with them, and with what a draft model takes for them, it may take `limit_s`."""
        self._methods.clear()
        gains = self._next_step(len(sequences))
        self._choose_asked(gains)
        drafts = self._drafts(sequences) if self._asks else {}
        model = self._model if self._asks_model else None
        is_plain = self._fixed is None and self._num_guessing >= PLAIN_EVERY
        found: dict[str, tuple[int, ...]] = {}
        if (drafts or model is not None) and not is_plain:
            num_guesses = sum([len(draft.token_ids) for draft in drafts.values()])
            if model is not None:
                num_guesses = len(sequences) * MOST_GUESSES
            most_rows = min(most_rows, MOST_ROWS)
            factors = self._costs.factors(len(sequences), min(most_rows, num_guesses))
            step = GuessedStep(len(sequences), plain_s, limit_s, factors)
            drafting_s = 0.0
            if model is not None and self._rounds is not None:
                begun_s = model.total_s
                better = self._rounds.guess(sequences, drafts, step)
                drafts |= better
                self._methods |= dict.fromkeys(better, model.method)
                drafting_s = model.total_s - begun_s
            counts = self._counts(list(drafts.values()), most_rows, step, drafting_s)
            found = {
                name: draft.token_ids[:count]
                for (name, draft), count in zip(drafts.items(), counts, strict=True)
                if count
            }
        self._num_guessing = max(0, self._num_guessing) + 1 if found else -1 if is_plain else 0
        return found

    def _choose_asked(self, gains: Gains | None) -> None:
        """Decides whether drafters and the model are asked for the present step."""
        was_asking = self._asks_model
        self._asks = gains is None or gains.asks(gains.others)
        self._asks_model = self._model is not None and (gains is None or gains.asks(gains.model))
        # Behind a step that gave a head nothing to guess with, one that asks it says nothing of what guessing gains.
        self._is_first = self.follows_steps and not was_asking

    def awaits(
        self, sequences: Sequence[EngineSequence], most_rows: int, plain_s: float = 0.0, limit_s: float = math.inf
    ) -> bool:
        """Whether a step in flight is to end before the next one is planned, since guesses behind its tokens are worth
        that: those that the known tokens give are taken to be right in it, and a model's as often as they were. Where
        not, the next step is planned ahead and has no guesses. The arguments are those of `propose`."""
        gains = None if self._fixed is not None else self._gains_of(len(sequences))
        self.is_resting = gains is not None and gains.rests
        self._choose_asked(gains)
        self._methods.clear()  # no guess is in flight
        is_known = not self.needs_times(plain_s) and len(sequences) <= MOST_AWAITING
        if is_known and 0 <= self._num_guessing < PLAIN_EVERY and (self._asks or self._asks_model):
            drafts = self._drafts_behind(sequences) if self._asks else {}
            chances = [chance for draft in drafts.values() for chance in draft.chances]
            if self._fixed is not None and chances:
                return True
            num_guesses = len(sequences) * MOST_GUESSES if self._asks_model else len(chances)
            most = min(most_rows, MOST_ROWS, num_guesses)
            step = GuessedStep(len(sequences), plain_s, limit_s, self._costs.factors(len(sequences), most))
            if step.best(sorted(chances, reverse=True))[0] > 0:
                return True
            if self._asks_model and self._rounds is not None and self._rounds.is_worth_waiting(sequences, drafts, step):
                return True
        self._num_guessing = 0
        if gains is not None and self.is_resting:
            gains.ended(0.0, 0)
        else:
            self._of_step, self._num_sequences = gains, len(sequences)
        return False

    def planned(self, *, has_waited: bool) -> None:
        """A step was planned, of whatever kind; `has_waited`: when nothing was in flight, since it or the one before
        was to have guesses."""
        of_step = None
        if self._clock is None:
            of_step, self._of_step = self._of_step, None
        asks = self._asks, self._asks_model
        self._planned.append(_Planned(of_step, asks, self._num_sequences, self._is_first, has_waited))

    @property
    def has_waited(self) -> bool:
        """Whether the oldest step that is not completed was waited for: then it took longer than one of its work that
        is planned ahead."""
        return bool(self._planned) and self._planned[0].has_waited

    def completed(self) -> None:
        """The oldest planned step's result was taken, and what it says was `measured` and `verified`."""
        step = self._planned.popleft()
        if self._clock is not None:
            return
        if step.gains is not None:
            # What was waited for behind a trial's last guesses says nothing of its steps without.
            is_known = not step.is_first and not (step.has_waited and not any(step.asks))
            num_tokens = step.num_sequences + self._num_right
            step.gains.ended(self._took_s if is_known else 0.0, num_tokens, step.asks)
        self._num_right, self._took_s = 0, 0.0

    def verified(self, sequence_id: str, num_guesses: int, num_accepted: int) -> None:
        """A sequence's guesses were computed, and the first ones were right."""
        method = self._methods.get(sequence_id)
        if method is not None:
            counters = self.counters
            counters.num_guesses[method] = counters.num_guesses.get(method, 0) + num_guesses
            counters.num_accepted[method] = counters.num_accepted.get(method, 0) + num_accepted
        self._num_right += num_accepted

    def measured(
        self, num_sequences: int, num_guesses: int, plain_s: float, step_s: float, drafting_s: float = 0.0
    ) -> None:
        """A decode step has ended; `plain_s` is predicted of it without its guesses. `drafting_s`: what a draft model
        took for it, which `step_s` leaves out."""
        if plain_s <= 0:
            return
        self._took_s = step_s + drafting_s
        # What a head guesses with makes all steps longer that give it, whether they have guesses or not.
        tells = num_guesses > 0 or not self.has_waited
        asks_model = self._planned[0].asks[1] if self._clock is None and self._planned else self._asks_model
        if tells and (asks_model or self._model is None or not self._model.follows_steps):
            self._costs.measured(num_sequences, num_guesses, step_s / plain_s)

    def take_drafting_s(self) -> float:
        """Seconds that a draft model took since the last call."""
        drafting_s = self._model.take_s() if self._model is not None else 0.0
        self.counters.drafting_s += drafting_s
        return drafting_s

    def lost(self, sequence_id: str) -> None:
        """The sequence gave its blocks back, and waits."""
        if self._model is not None:
            self._model.forget(sequence_id)

    def ended(self, sequence_id: str) -> None:
        """The sequence has left."""
        for drafter in self._drafters:
            drafter.forget(sequence_id)
        self._methods.pop(sequence_id, None)
        self.lost(sequence_id)

    def rests(self, num_sequences: int) -> bool:
        """Begins a step: whether no drafter is to be asked for it, so that there is nothing to `propose`. Nearly all
        steps end here where guessing loses."""
        self._end_step()
        gains = self._gains.get(num_sequences.bit_length())
        self.is_resting = gains is not None and gains.rests
        if gains is not None and self.is_resting:
            self._asks_model = False
            gains.ended(0.0, 0)
        return self.is_resting

    def _end_step(self) -> None:
        if self._of_step is not None:
            took_s = 0.0 if self._is_first else self._took_s
            if took_s > 0 and self._clock is not None:
                took_s = self._clock() - self._begun_s
            self._of_step.ended(took_s, self._num_sequences + self._num_right)
        self._of_step, self._num_right, self._took_s = None, 0, 0.0

    def _next_step(self, num_sequences: int) -> Gains | None:
        """All is known of the step before. What is known of guesses in batches of about the next one's size; None where
        they are made whatever they cost."""
        if self._fixed is not None:
            return None
        self._end_step()
        self._num_sequences = num_sequences
        self._begun_s = self._clock() if self._clock is not None else 0.0
        self._of_step = self._gains_of(num_sequences)
        return self._of_step

    def _gains_of(self, num_sequences: int) -> Gains | None:
        size = num_sequences.bit_length()
        gains = self._gains.get(size)
        if gains is None and num_sequences:
            gains = self._gains[size] = Gains(bool(self._drafters), self._model is not None)
        return gains

    def _drafts(self, sequences: Sequence[EngineSequence]) -> dict[str, Draft]:
        """The best of all drafters, for those sequences that have any."""
        drafts: dict[str, Draft] = {}
        for sequence in sequences:
            draft = self._draft(sequence)
            if draft.token_ids:
                drafts[sequence.sequence_id] = draft
        return drafts

    def _drafts_behind(self, sequences: Sequence[EngineSequence]) -> dict[str, Draft]:
        """What drafters give behind the step in flight, whose tokens they guess first."""
        pending = {item.sequence_id: item.num_in_flight_samples for item in sequences}
        drafts = self._drafts(sequences)
        return {
            name: Draft(draft.token_ids[count:], draft.chances[count:])
            for name, draft in drafts.items()
            if len(draft.token_ids) > (count := pending[name])
        }

    def _draft(self, sequence: EngineSequence) -> Draft:
        """The best of all drafters: that whose guesses are expected to give the most tokens."""
        choice, most = sequence.sampling.speculation, most_guesses(sequence)
        best, best_tokens = NO_DRAFT, 0.0
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

    def _counts(self, drafts: Sequence[Draft], most_rows: int, step: GuessedStep, drafting_s: float) -> list[int]:
        """How many guesses of each draft are computed."""
        counts = [0] * len(drafts)
        if self._fixed is not None:
            rows = [(1.0, place) for place, draft in enumerate(drafts) for _ in draft.token_ids[: self._fixed]]
            best = min(len(rows), most_rows)
            self.expected = NOTHING_EXPECTED
        else:
            rows = [(chance, place) for place, draft in enumerate(drafts) for chance in draft.chances]
            rows.sort(reverse=True)
            chances = [chance for chance, _ in rows]
            best, _ = step.best(chances, drafting_s)
            if rows:
                tokens_each = 1.0 + sum(chances[:best]) / step.num_sequences
                self.expected = Expected(tokens_each, step.took_s(best, drafting_s))
        for _, place in rows[:best]:
            counts[place] += 1
        return counts
