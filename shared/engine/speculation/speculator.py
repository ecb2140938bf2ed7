"""How many guesses each sequence of a decode step has: as many as make the step's tokens come faster.

Each guess has a chance to become a token, and a row that makes the step longer. Rows go to the likeliest guesses first,
and as many are taken as give the most tokens a second; often none is.

A draft model's guesses take time before the step, too. It is asked where, by how often its guesses were right so far,
the step's tokens then come faster all the same; and for one guess more as long as that brings more tokens for its time
than the step does without.

What is expected is then held to what comes of it: where steps that ask drafters bring fewer tokens for all the time
that they take than steps that do not (`gain`), none is asked for a while. The draft model and all others are held to
that apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.engine.sampling_params import DRAFTERS, MOST_GUESSES
from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import LEAST_CHANCE, NO_DRAFT, Draft, Drafter
from shared.engine.speculation.gain import Gains
from shared.engine.speculation.guessing_model import GuessingModel
from shared.engine.speculation.row_costs import RowCosts

MOST_ROWS = 64
"""Guesses of a step, over all sequences."""
LEAST_GAIN = 1.03
"""Of a step's tokens a second, from which on guesses are worth their rows: less is within what is known of both."""
PLAIN_EVERY = 256
"""Steps of which one has no guesses at least, so that its time is known."""
PROBE_EVERY = 64
"""Steps of which one asks a draft model that seems not to be worth its time: texts change."""
CATCH_UP_SHARE = 0.25
"""Of a step, the time in which a draft model may compute prompts."""
GAINED_SHARE, PROBED_SHARE = 0.2, 0.02
"""Of the rest of an answer, the time that its prompt may take the draft model: no more is likely to be gained. And
where the draft seems not to be worth its time."""


@dataclass(slots=True)
class GuessCounters:
    """Sums since start, by method, of all that there are. The engine thread adds; any thread may read."""

    num_guesses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTERS, 0))
    """Guesses that were computed."""
    num_accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFTERS, 0))
    """Of these, those that became tokens."""
    drafting_s: float = 0.0
    """What a draft model took. Seconds."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What guesses may add to."""

    num_sequences: int
    plain_s: float
    """Of the step without guesses."""
    limit_s: float
    """That it may take."""
    factors: Sequence[float]
    """What it takes with 0, 1, … rows more, over what it takes without."""

    def best(self, chances: Sequence[float], drafting_s: float = 0.0) -> tuple[int, float]:
        """The number of rows, the likeliest of `chances` first, with which tokens come fastest when `drafting_s` were
        spent before, and how many come in the time of a step without guesses."""
        drafting = drafting_s / self.plain_s if self.plain_s else 0.0
        best, num_tokens = 0, float(self.num_sequences)
        best_rate = num_tokens / (1.0 + drafting)
        least = LEAST_GAIN
        for count, chance in enumerate(chances[: len(self.factors) - 1], 1):
            num_tokens += chance
            if self.plain_s * self.factors[count] + drafting_s > self.limit_s:
                break
            rate = num_tokens / (self.factors[count] + drafting)
            if rate > least * best_rate:
                best, best_rate, least = count, rate, 1.0
        return best, best_rate

    def is_worth_a_round(
        self,
        chances: Sequence[float],
        gain: float,
        num_rows: int,
        drafting_s: float,
        round_s: float,
        least_rate: float,
    ) -> bool:
        """Whether one round more, for `num_rows` guesses of which `gain` are expected to be right, brings more tokens
        for its time than the step with `chances` does, and than `least_rate`, as `best` has it."""
        count, rate = self.best(chances, drafting_s)
        rows = count + num_rows
        if rows >= len(self.factors):
            return False
        if self.plain_s * self.factors[rows] + drafting_s + round_s > self.limit_s:
            return False
        longer = self.factors[rows] - self.factors[count] + round_s / self.plain_s
        return gain > max(rate, least_rate) * longer


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
        self._costs = RowCosts()
        self._methods: dict[str, str] = {}  # of the guesses that are computed now, by sequence
        self._gains: dict[int, Gains] = {}  # by the size of a batch
        self._of_step: Gains | None = None  # of the present step
        self.is_resting = False
        """Whether none is asked for the present step: then nothing is learned from it."""
        self._asks_model = False  # for the present step
        self._is_first = False  # of those that ask a head
        self._num_sequences = 0  # of it
        self._num_right = 0  # of its guesses
        self._clock = processor_clock
        self._begun_s = 0.0  # on that clock
        self._took_s = 0.0  # 0: not known
        self._num_guessing = 0  # steps with guesses, since the last one without
        self._num_unasked = 0  # steps in which the model could have been asked and was not, since it was
        self.counters = GuessCounters()

    @property
    def methods(self) -> frozenset[str]:
        """Of the drafters that it asks."""
        drafters = [drafter.method for drafter in self._drafters]
        return frozenset(drafters if self._model is None else [*drafters, self._model.method])

    @property
    def follows_steps(self) -> bool:
        """Whether the present step is to give what a head guesses with: not where it is not asked, in a trial's steps
        without guesses least of all, which would seem as long as those with."""
        return self._asks_model and self._model is not None and self._model.follows_steps

    def num_written_ahead(self, sequence: EngineSequence) -> int:
        """Tokens behind its newest one that are guessed in the sequence's blocks, before a step computes any."""
        model = self._model
        if model is None or not model.writes_ahead or not _may_ask(model, sequence):
            return 0
        return self._most(sequence)

    def propose(
        self, sequences: Sequence[EngineSequence], most_rows: int, plain_s: float = 0.0, limit_s: float = math.inf
    ) -> Mapping[str, tuple[int, ...]]:
        """Guesses by sequence, for those that have some, up to `most_rows` in all. Without guesses the step takes
        `plain_s`, with them, and with what a draft model takes for them, it may take `limit_s`."""
        self._methods.clear()
        gains = self._next_step(len(sequences))
        drafts = self._drafts(sequences) if gains is None or gains.asks(gains.others) else {}
        model = self._model if gains is None or gains.asks(gains.model) else None
        was_asking, self._asks_model = self._asks_model, model is not None
        # Behind a step that gave a head nothing to guess with, one that asks it says nothing of what guessing gains.
        self._is_first = self.follows_steps and not was_asking
        is_plain = self._fixed is None and self._num_guessing >= PLAIN_EVERY
        found: dict[str, tuple[int, ...]] = {}
        if (drafts or model is not None) and not is_plain:
            num_guesses = sum([len(draft.token_ids) for draft in drafts.values()])
            if model is not None:
                num_guesses = len(sequences) * MOST_GUESSES
            most_rows = min(most_rows, MOST_ROWS)
            factors = self._costs.factors(len(sequences), min(most_rows, num_guesses))
            step = _Step(len(sequences), plain_s, limit_s, factors)
            drafting_s = 0.0
            if model is not None:
                drafting_s = self._ask(model, sequences, drafts, step)
            counts = self._counts(list(drafts.values()), most_rows, step, drafting_s)
            found = {
                name: draft.token_ids[:count]
                for (name, draft), count in zip(drafts.items(), counts, strict=True)
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
        if self._asks_model or self._model is None or not self._model.follows_steps:
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
        size = num_sequences.bit_length()
        gains = self._gains.get(size)
        if gains is None and num_sequences:
            gains = self._gains[size] = Gains(bool(self._drafters), self._model is not None)
        self._of_step = gains
        return gains

    def _drafts(self, sequences: Sequence[EngineSequence]) -> dict[str, Draft]:
        """The best of all drafters, for those sequences that have any."""
        drafts: dict[str, Draft] = {}
        for sequence in sequences:
            draft = self._draft(sequence)
            if draft.token_ids:
                drafts[sequence.sequence_id] = draft
        return drafts

    def _draft(self, sequence: EngineSequence) -> Draft:
        """The best of all drafters: that whose guesses are expected to give the most tokens."""
        choice, most = sequence.sampling.speculation, _most_guesses(sequence)
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

    def _counts(self, drafts: Sequence[Draft], most_rows: int, step: _Step, drafting_s: float) -> list[int]:
        """How many guesses of each draft are computed."""
        counts = [0] * len(drafts)
        if self._fixed is not None:
            rows = [(1.0, place) for place, draft in enumerate(drafts) for _ in draft.token_ids[: self._fixed]]
            best = min(len(rows), most_rows)
        else:
            rows = [(chance, place) for place, draft in enumerate(drafts) for chance in draft.chances]
            rows.sort(reverse=True)
            best, _ = step.best([chance for chance, _ in rows], drafting_s)
        for _, place in rows[:best]:
            counts[place] += 1
        return counts

    # --- the draft model

    def _ask(
        self, model: GuessingModel, sequences: Sequence[EngineSequence], drafts: dict[str, Draft], step: _Step
    ) -> float:
        """Puts the model's guesses in the place of `drafts`, by sequence, where they are expected to be worth more.
        Returns the seconds that this took."""
        asked = [sequence for sequence in sequences if _may_ask(model, sequence)]
        if not asked or (step.plain_s <= 0 and self._fixed is None):
            return 0.0
        begun_s = model.total_s
        self._catch_up(model, asked, step)
        chosen = self._choose(model, [sequence for sequence in asked if model.is_ready(sequence)], drafts, step)
        if not chosen:
            self._num_unasked += 1
            return model.total_s - begun_s
        self._num_unasked = 0
        _, least_rate = step.best(_falling(list(drafts.values())))
        rounds = [model.begin(sequence, self._most(sequence)) for sequence in chosen]
        others = [draft for name, draft in drafts.items() if name not in {item.sequence_id for item in chosen}]
        running = rounds
        while running:
            model.round(running)
            running = [
                item
                for item in running
                if len(item.token_ids) < item.most and (self._fixed is not None or item.next_chance >= LEAST_CHANCE)
            ]
            if running and self._fixed is None:
                round_s = model.round_s([item.sequence for item in running], step.plain_s)
                chances = _falling([*others, *(item.draft for item in rounds)])
                gain = sum([item.next_chance for item in running])
                drafting_s = model.total_s - begun_s
                if not step.is_worth_a_round(chances, gain, len(running), drafting_s, round_s, least_rate):
                    break
        for item in rounds:
            name, draft = item.sequence.sequence_id, item.draft
            if sum(draft.chances) > sum(drafts.get(name, NO_DRAFT).chances):
                drafts[name] = draft
                self._methods[name] = model.method
        return model.total_s - begun_s

    def _most(self, sequence: EngineSequence) -> int:
        most = _most_guesses(sequence)
        return most if self._fixed is None else min(most, self._fixed)

    def _catch_up(self, model: GuessingModel, asked: Sequence[EngineSequence], step: _Step) -> None:
        """Brings the first sequence that is not ready nearer to that, where this is expected to gain time."""
        behind = [sequence for sequence in asked if not model.is_ready(sequence)]
        if self._fixed is not None:
            for sequence in behind:
                model.catch_up(sequence, math.inf)
            return
        within_s = min(CATCH_UP_SHARE * step.plain_s, step.limit_s - step.plain_s)
        if not behind or within_s <= 0:
            return
        is_useful = self._depth(model, behind[:1], [], step) > 0
        if not is_useful and self._num_unasked < PROBE_EVERY:
            return
        share = GAINED_SHARE if is_useful else PROBED_SHARE
        for sequence in behind:
            if model.prompt_s(sequence) <= share * sequence.num_guessable_tokens * step.plain_s:
                model.catch_up(sequence, within_s)
                return

    def _choose(
        self, model: GuessingModel, ready: Sequence[EngineSequence], drafts: Mapping[str, Draft], step: _Step
    ) -> Sequence[EngineSequence]:
        """Those that the model is asked for: all whose other guesses are expected to be worth less, or none."""
        if self._fixed is not None:
            return [sequence for sequence in ready if sequence.sequence_id not in drafts]
        chosen, others = [], []
        for sequence in ready:
            chance, draft = model.mean_chance(sequence), drafts.get(sequence.sequence_id, NO_DRAFT)
            expected = sum([chance**count for count in range(1, _most_guesses(sequence) + 1)])
            if expected > sum(draft.chances):
                chosen.append(sequence)
        names = {sequence.sequence_id for sequence in chosen}
        others = [draft for name, draft in drafts.items() if name not in names]
        if chosen and self._depth(model, chosen, others, step, drafts) > 0:
            return chosen
        return ready[:1] if self._num_unasked >= PROBE_EVERY else []

    def _depth(
        self,
        model: GuessingModel,
        chosen: Sequence[EngineSequence],
        others: Sequence[Draft],
        step: _Step,
        drafts: Mapping[str, Draft] | None = None,
    ) -> int:
        """The number of rounds for these sequences, beside the drafts of others, with which tokens are expected to come
        fastest; 0 where they come as fast without any, by `drafts`."""
        round_s = model.round_s(chosen, step.plain_s)
        chances = [(model.mean_chance(sequence), _most_guesses(sequence)) for sequence in chosen]
        _, rate = step.best(_falling(list((drafts or {}).values())))
        # No later round brings more than the first one, and each costs as much.
        if sum([chance for chance, _ in chances]) * step.plain_s <= rate * round_s:
            return 0
        rows = [chance for draft in others for chance in draft.chances]
        best, best_rate = 0, LEAST_GAIN * rate
        for depth in range(1, max(most for _, most in chances) + 1):
            rows += [chance**depth for chance, most in chances if depth <= most]
            _, rate = step.best(sorted(rows, reverse=True), depth * round_s)
            if rate > best_rate:
                best, best_rate = depth, rate
            elif best:
                break
        return best


def _falling(drafts: Sequence[Draft]) -> list[float]:
    return sorted((chance for draft in drafts for chance in draft.chances), reverse=True)


def _may_ask(model: GuessingModel, sequence: EngineSequence) -> bool:
    allows = sequence.sampling.speculation.allows(model.method)
    return allows and _most_guesses(sequence) > 0 and model.takes(sequence)


def _most_guesses(sequence: EngineSequence) -> int:
    return min(sequence.sampling.speculation.most_guesses, sequence.num_guessable_tokens)
