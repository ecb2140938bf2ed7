"""What all models have in common that guess in rounds, one token for each of several sequences: how often their guesses
are right, learned by the probability that they gave them, and what a round takes. Pure policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import exp

from shared.engine.plan import NoToken, SampledToken, SampleSpec
from shared.engine.sampling_params import SamplingParams
from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import Draft
from shared.engine.speculation.record import Record
from shared.sizing.step_fit import StepTimeFit
from shared.sizing.step_time import StepWork

FIRST_ROUND_SHARE = 0.15
"""Share of the target's step that a round is taken to last before some were measured."""

_LEAST_PROBABILITIES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Probabilities from which on guesses are right more often than with lower ones."""
_FIRST_CHANCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Chance of one guess, by the class of its probability, before any was seen."""
_FIRST_MEAN = 0.6
_FIRST_WEIGHT, _OWN_WEIGHT = 16.0, 12.0
"""In observations: of the first chances beside what all sequences showed, and of that beside what one did."""
_KEPT, _KEPT_BY_ALL = 0.97, 0.998
"""The weight that an observation of a sequence, and of all, has left one later."""


@dataclass(slots=True)
class GuessRecord:
    """What a model has guessed for one sequence, and how often that was right."""

    sampling: SamplingParams  # by which its guesses are drawn
    means: Record  # of one class
    guessed_at: int = 0  # position of the first one of …
    guesses: list[tuple[int, int]] = field(default_factory=list)  # (token, class) that were made last


@dataclass(slots=True)
class Drafted:
    """A sequence's guesses as the rounds give them."""

    sequence: EngineSequence
    most: int
    """Guesses that it may have."""
    token_ids: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    """Chance of each guess to be right; see `Draft`."""
    next_chance: float = 0.0
    """Chance that a further guess is right, as far as can be said before it is made, and all before it are."""

    @property
    def draft(self) -> Draft:
        """The guesses so far."""
        return Draft(tuple(self.token_ids), tuple(self.chances))


class GuessingModel(ABC):
    """What a `Speculator` asks for rounds. The engine thread alone calls it."""

    method: str
    """Its name in settings, requests and metrics."""
    follows_steps = False
    """Whether it guesses from what the model's steps give."""
    writes_ahead = False
    """Whether it writes to the blocks of the model's pool, behind the newest token."""
    is_queued = False
    """Whether a device computes it: then several rounds follow each other there before the host knows the first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds."""
        self._clock = clock
        self._fit = StepTimeFit()
        # By whether sampling is greedy.
        self._classes = {greedy: Record(_FIRST_CHANCES, _FIRST_WEIGHT, _KEPT_BY_ALL) for greedy in (False, True)}
        self._means = {greedy: Record((_FIRST_MEAN,), _FIRST_WEIGHT, _KEPT_BY_ALL) for greedy in (False, True)}
        self._taken_s = 0.0
        self.total_s = 0.0
        """Time that its steps have taken. Seconds."""

    # --- what each does in its way

    @abstractmethod
    def takes(self, sequence: EngineSequence) -> bool:
        """Whether it may guess for this sequence at all."""

    @abstractmethod
    def is_ready(self, sequence: EngineSequence) -> bool:
        """Whether a round may begin with this sequence. Learns from the tokens that came."""

    @abstractmethod
    def will_be_ready(self, sequence: EngineSequence) -> bool:
        """Whether a round may begin with this sequence once the step in flight has ended."""

    @abstractmethod
    def begin(self, sequence: EngineSequence, most: int) -> Drafted:
        """Before the rounds of a sequence that is ready; `most`: guesses."""

    @abstractmethod
    def round(self, drafts: Sequence[Drafted], count: int = 1) -> None:
        """`count` guesses more for each of these, but for those that can have none: they may have no more. None has
        fewer left. Above 1 where it `is_queued`."""

    @abstractmethod
    def forget(self, sequence_id: str) -> None:
        """The sequence has left, or lost its blocks of the target's pool."""

    def catch_up(self, sequence: EngineSequence, within_s: float) -> None:  # noqa: B027
        """Brings a sequence that is not ready nearer to that, in about `within_s`. By default it becomes ready by the
        target's next step."""

    def prompt_s(self, sequence: EngineSequence) -> float:  # noqa: ARG002
        """What `catch_up` is predicted to take in all; 0 where nothing is known."""
        return 0.0

    @abstractmethod
    def _record(self, sequence_id: str) -> GuessRecord | None:
        """The record of a sequence that it has guessed for, or begun with."""

    # --- what they share

    def mean_chance(self, sequence: EngineSequence) -> float:
        """Chance that a guess is right where those before it are, before it is made."""
        record = self._record(sequence.sequence_id)
        mean = self._means[sequence.sampling.is_greedy].chance(0)
        return mean if record is None else record.means.chance(0, mean)

    def round_s(self, sequences: Sequence[EngineSequence], target_s: float) -> float:
        """What a round of these sequences is predicted to take, where a step of the target takes `target_s`."""
        times = self._fit.times
        if times is None:
            return FIRST_ROUND_SHARE * target_s
        return times.step_s(StepWork(len(sequences), sum([sequence.num_tokens for sequence in sequences])))

    def take_s(self) -> float:
        """Seconds that its steps have taken since the last call."""
        taken, self._taken_s = self._taken_s, 0.0
        return taken

    def _new_record(self, sequence: EngineSequence) -> GuessRecord:
        first = self._means[sequence.sampling.is_greedy].chance(0)
        return GuessRecord(_as_guessed(sequence.sampling), Record((first,), _OWN_WEIGHT, _KEPT))

    def _specs(self, draft: Drafted, record: GuessRecord, count: int) -> tuple[SampleSpec, ...]:
        """How the next guesses are drawn: in the context of the guesses before each."""
        sequence, guesses, sampling = draft.sequence, draft.token_ids, record.sampling
        prompt: tuple[int, ...] = ()
        output: tuple[int, ...] = ()
        if sampling.has_penalties:
            # Given each time: what was counted of earlier guesses may have been wrong.
            prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
            output = (*sequence.token_ids[sequence.num_prompt_tokens :], *guesses)
        specs = []
        for place in range(len(guesses), len(guesses) + count):
            banned = sequence.banned_token_ids(place)
            specs.append(SampleSpec(sampling, sequence.num_tokens + place, prompt, output, banned))
            prompt = output = ()  # the sampler counts what it chooses
        return tuple(specs)

    def _begin(self, sequence: EngineSequence, record: GuessRecord, most: int) -> Drafted:
        record.guessed_at, record.guesses = sequence.num_tokens, []
        return Drafted(sequence, most, next_chance=self.mean_chance(sequence))

    def _take(self, draft: Drafted, record: GuessRecord, found: SampledToken) -> None:
        """A guess was made, with its log-probability."""
        greedy = draft.sequence.sampling.is_greedy
        of_class = bisect(_LEAST_PROBABILITIES, exp(found.logprob or 0.0))
        record.guesses.append((found.token_id, of_class))
        before = draft.chances[-1] if draft.chances else 1.0
        draft.token_ids.append(found.token_id)
        draft.chances.append(before * self._classes[greedy].chance(of_class))
        draft.next_chance = draft.chances[-1] * self.mean_chance(draft.sequence)

    def _take_all(self, draft: Drafted, record: GuessRecord, found: Iterable[SampledToken | NoToken]) -> bool:
        """Guesses were made one behind the other. False where one could not be chosen: those behind it mean nothing,
        and there are to be no more."""
        for token in found:
            if not isinstance(token, SampledToken):
                draft.most = len(draft.token_ids)
                return False
            self._take(draft, record, token)
        return True

    def _learn(self, sequence: EngineSequence, record: GuessRecord) -> None:
        """Takes in which of the guesses made last were right; tokens have come since."""
        token_ids, greedy = sequence.token_ids, sequence.sampling.is_greedy
        for place, (guess, of_class) in enumerate(record.guesses, record.guessed_at):
            if place == len(token_ids):
                break
            right = guess == token_ids[place]
            self._classes[greedy].add(of_class, right)
            self._means[greedy].add(0, right)
            record.means.add(0, right)
            if not right:
                break
        record.guesses = []

    def _timed(self, work: StepWork, begun_s: float, count: int = 1) -> None:
        """`count` steps of that work have ended."""
        seconds = self._clock() - begun_s
        self._fit.observe(work, seconds / count)
        self._taken_s += seconds
        self.total_s += seconds


def _as_guessed(sampling: SamplingParams) -> SamplingParams:
    """The settings by which guesses are drawn: with the probability of what is drawn."""
    return replace(sampling, logprobs=0, prompt_logprobs=None, structured_output=None, pooling="", stop=())
