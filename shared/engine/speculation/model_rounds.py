"""For which sequences of a step a guessing model is asked, and for how many rounds.

Its guesses take time before the step. It is asked where, by how often its guesses were right so far, the step's tokens
then come faster all the same; and for one guess more as long as that brings more tokens for its time than the step does
without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import LEAST_CHANCE, NO_DRAFT, Draft, most_guesses
from shared.engine.speculation.guessing_model import Drafted, GuessingModel
from shared.engine.speculation.row_costs import LEAST_GAIN, GuessedStep

PROBE_EVERY = 64
"""Steps of which one asks a model that seems not to be worth its time: texts change."""
CATCH_UP_SHARE = 0.25
"""Share of a step's time in which a model may compute prompts."""
GAINED_SHARE, PROBED_SHARE = 0.2, 0.02
"""Share of an answer's remaining time that its prompt may take the model: no more is likely to be gained. And where the
model seems not to be worth its time."""


class ModelRounds:
    """Part of a speculator. Not thread-safe."""

    def __init__(self, model: GuessingModel, num_guesses: int | None) -> None:
        """`num_guesses`: as in `Speculator`."""
        self._model = model
        self._fixed = num_guesses
        self._num_unasked = 0  # steps in which the model could have been asked and was not, since it was

    def may_ask(self, sequence: EngineSequence) -> bool:
        """Whether the model may guess for a sequence at all."""
        allows = sequence.sampling.speculation.allows(self._model.method)
        return allows and most_guesses(sequence) > 0 and self._model.takes(sequence)

    def most(self, sequence: EngineSequence) -> int:
        """Guesses that it may make for a sequence."""
        most = most_guesses(sequence)
        return most if self._fixed is None else min(most, self._fixed)

    def guess(
        self, sequences: Sequence[EngineSequence], drafts: Mapping[str, Draft], step: GuessedStep
    ) -> dict[str, Draft]:
        """The model's guesses, by sequence, for those for which they are expected to be worth more than `drafts`."""
        asked = [sequence for sequence in sequences if self.may_ask(sequence)]
        if not asked or (step.plain_s <= 0 and self._fixed is None):
            return {}
        model = self._model
        begun_s = model.total_s
        self._catch_up(asked, step)
        chosen = self._choose([sequence for sequence in asked if model.is_ready(sequence)], drafts, step)
        if not chosen:
            self._num_unasked += 1
            return {}
        self._num_unasked = 0
        _, least_rate = step.best(_falling(list(drafts.values())))
        rounds = [model.begin(sequence, self.most(sequence)) for sequence in chosen]
        others = [draft for name, draft in drafts.items() if name not in {item.sequence_id for item in chosen}]
        running, count = rounds, self._num_at_once(rounds, others, step)
        while running:
            model.round(running, min(count, *(item.most - len(item.token_ids) for item in running)))
            count = 1
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
        found = {item.sequence.sequence_id: item.draft for item in rounds}
        return {
            name: draft for name, draft in found.items() if sum(draft.chances) > sum(drafts.get(name, NO_DRAFT).chances)
        }

    def is_worth_waiting(
        self, sequences: Sequence[EngineSequence], drafts: Mapping[str, Draft], step: GuessedStep
    ) -> bool:
        """Whether the step in flight is to end first, since the model is then to be asked, or brought nearer to being
        ready. `drafts`: other guesses behind that step."""
        asked = [sequence for sequence in sequences if self.may_ask(sequence)]
        if not asked:
            return False
        ready = [sequence for sequence in asked if self._model.will_be_ready(sequence)]
        if self._choose(ready, drafts, step):
            return True
        if not self._model.follows_steps:
            names = {sequence.sequence_id for sequence in ready}
            behind = [sequence for sequence in asked if sequence.sequence_id not in names]
            if behind and (self._fixed is not None or self._next_to_catch_up(behind, step) is not None):
                return True
        self._num_unasked += 1
        return False

    def _num_at_once(self, rounds: Sequence[Drafted], others: Sequence[Draft], step: GuessedStep) -> int:
        """Guesses of the first rounds that follow each other unseen: as many as are worth it in the mean."""
        if not self._model.is_queued:
            return 1
        if self._fixed is not None:
            return self._fixed
        return max(1, self._depth([item.sequence for item in rounds], others, step))

    def _catch_up(self, asked: Sequence[EngineSequence], step: GuessedStep) -> None:
        """Brings the first sequence that is not ready nearer to that, where this is expected to gain time."""
        behind = [sequence for sequence in asked if not self._model.is_ready(sequence)]
        if self._fixed is not None:
            for sequence in behind:
                self._model.catch_up(sequence, math.inf)
            return
        chosen = self._next_to_catch_up(behind, step)
        if chosen is not None:
            self._model.catch_up(chosen, _spare_s(step))

    def _next_to_catch_up(self, behind: Sequence[EngineSequence], step: GuessedStep) -> EngineSequence | None:
        if not behind or _spare_s(step) <= 0:
            return None
        is_useful = self._depth(behind[:1], [], step) > 0
        if not is_useful and self._num_unasked < PROBE_EVERY:
            return None
        share = GAINED_SHARE if is_useful else PROBED_SHARE
        for sequence in behind:
            if self._model.prompt_s(sequence) <= share * sequence.num_guessable_tokens * step.plain_s:
                return sequence
        return None

    def _choose(
        self, ready: Sequence[EngineSequence], drafts: Mapping[str, Draft], step: GuessedStep
    ) -> Sequence[EngineSequence]:
        """The sequences that the model is asked for: all whose other guesses are expected to be worth less, or none."""
        if self._fixed is not None:
            return [sequence for sequence in ready if sequence.sequence_id not in drafts]
        chosen = list[EngineSequence]()
        for sequence in ready:
            chance, draft = self._model.mean_chance(sequence), drafts.get(sequence.sequence_id, NO_DRAFT)
            expected = sum([chance**count for count in range(1, most_guesses(sequence) + 1)])
            if expected > sum(draft.chances):
                chosen.append(sequence)
        names = {sequence.sequence_id for sequence in chosen}
        others = [draft for name, draft in drafts.items() if name not in names]
        if chosen and self._depth(chosen, others, step, drafts) > 0:
            return chosen
        return ready[:1] if self._num_unasked >= PROBE_EVERY else []

    def _depth(
        self,
        chosen: Sequence[EngineSequence],
        others: Sequence[Draft],
        step: GuessedStep,
        drafts: Mapping[str, Draft] | None = None,
    ) -> int:
        """The number of rounds for these sequences, beside the drafts of others, with which tokens are expected to come
        fastest; 0 where they come as fast without any, by `drafts`."""
        round_s = self._model.round_s(chosen, step.plain_s)
        chances = [(self._model.mean_chance(sequence), most_guesses(sequence)) for sequence in chosen]
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


def _spare_s(step: GuessedStep) -> float:
    """Seconds beside a step in which prompts may be computed."""
    return min(CATCH_UP_SHARE * step.plain_s, step.limit_s - step.plain_s)


def _falling(drafts: Sequence[Draft]) -> list[float]:
    return sorted((chance for draft in drafts for chance in draft.chances), reverse=True)
