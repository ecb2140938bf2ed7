"""Guesses of a second, small model: the token that its own logits give by the sampling settings, the seed and the
position of the sequence. The target's token there is drawn by the same randomness, so the two are the same far more
often than two tokens drawn one by one; with greedy sampling both take their likeliest.

The draft has a KV pool of its own, in which a sequence has blocks while it runs. What is guessed is computed in rounds,
one token for each of several sequences. The KV of a wrong guess lies behind all that is valid, and is written over.
Prompts are computed a few tokens a step; until then there is nothing from here. A prefix that the draft has computed
for another sequence is found by its hashes.

How often guesses are right is learned by the probability that the draft gave them. Pure policy: `runner` has the
tensors.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from typing import Protocol

from shared.engine.plan import PlannedSequence, SampledToken, SampleSpec, StepPlan, StepResult, step_work
from shared.engine.sampling_params import SamplingParams
from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import Draft
from shared.engine.speculation.record import Record
from shared.kv.hashing import extend_chain
from shared.kv.pool import BlockPool, OutOfBlocks
from shared.sizing.step_fit import StepTimeFit
from shared.sizing.step_time import StepWork, chunk_pairs

FEW_TOKENS = 8
"""Tokens without KV that a sequence may have for a round to begin with it; more are computed in spare time before."""
LEAST_CHUNK, MOST_CHUNK = 16, 512
"""Tokens of a prompt that are computed at once, however short or long the time is."""
FIRST_ROUND_SHARE = 0.15
"""Of the target's step, what a round is taken to last before some were measured."""

_LEAST_PROBABILITIES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
"""From which on guesses are right more often than with less."""
_FIRST_CHANCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Of one guess, by the class of its probability, before any was seen."""
_FIRST_MEAN = 0.6
_FIRST_WEIGHT, _OWN_WEIGHT = 16.0, 12.0
"""In observations: of the first chances beside what all sequences showed, and of that beside what one did."""
_KEPT, _KEPT_BY_ALL = 0.97, 0.998
"""The weight that an observation of a sequence, and of all, has left one later."""


class DraftRunner(Protocol):
    """Computes steps of the draft over its pool."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Writes the KV of the plan's tokens, and chooses a token where the plan has a sample."""
        ...


@dataclass(slots=True)
class _Held:
    """What the draft has of one sequence."""

    sequence: EngineSequence
    sampling: SamplingParams
    means: Record  # of one class
    block_ids: list[int] = field(default_factory=list)
    table: tuple[int, ...] = ()  # the same, made anew where those grew
    hashes: list[bytes] = field(default_factory=list)  # of full blocks
    num_valid: int = 0  # tokens of the sequence whose KV the blocks hold
    written: list[int] = field(default_factory=list)  # behind these, the newest token and guesses that have KV as well
    guessed_at: int = 0  # position of the first one of …
    guesses: list[tuple[int, int]] = field(default_factory=list)  # (token, class) that were made last
    is_broken: bool = False  # its logits were no numbers


@dataclass(slots=True)
class Drafted:
    """A sequence's guesses as the rounds give them."""

    sequence: EngineSequence
    most: int
    """Guesses that it may have."""
    token_ids: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    """As in `Draft`."""
    next_chance: float = 0.0
    """That a further guess is right, as far as can be said before it is made, and all before it are."""

    @property
    def draft(self) -> Draft:
        """The guesses so far."""
        return Draft(tuple(self.token_ids), tuple(self.chances))


class DraftModel:
    """The draft's sequences, blocks and rounds. The engine thread alone calls it."""

    method = "draft"

    def __init__(
        self,
        runner: DraftRunner,
        pool: BlockPool,
        most_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`runner` computes over the blocks of `pool`, which no one else uses. `most_tokens`: of a sequence that the
        draft has positions for. `clock`: in seconds."""
        self.pool = pool
        self._runner = runner
        self._most_tokens = most_tokens
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._fit = StepTimeFit()
        # By whether sampling is greedy.
        self._classes = {greedy: Record(_FIRST_CHANCES, _FIRST_WEIGHT, _KEPT_BY_ALL) for greedy in (False, True)}
        self._means = {greedy: Record((_FIRST_MEAN,), _FIRST_WEIGHT, _KEPT_BY_ALL) for greedy in (False, True)}
        self._taken_s = 0.0
        self.total_s = 0.0
        """Time that the draft's steps have taken. Seconds."""

    def takes(self, sequence: EngineSequence) -> bool:
        """Whether it may guess for this sequence at all."""
        held = self._held.get(sequence.sequence_id)
        return sequence.num_tokens < self._most_tokens and (held is None or not held.is_broken)

    def mean_chance(self, sequence: EngineSequence) -> float:
        """That a guess is right where those before it are, before it is made."""
        held = self._held.get(sequence.sequence_id)
        mean = self._means[sequence.sampling.is_greedy].chance(0)
        return mean if held is None else held.means.chance(0, mean)

    def is_ready(self, sequence: EngineSequence) -> bool:
        """Whether a round may begin with this sequence: all but its newest tokens have KV. Learns from those that
        came."""
        held = self._held.get(sequence.sequence_id)
        if held is None:
            return False
        self._follow(held)
        return sequence.num_tokens - held.num_valid <= FEW_TOKENS

    def begin(self, sequence: EngineSequence, most: int) -> Drafted:
        """Before the rounds of a sequence that is ready; `most`: guesses."""
        most = min(most, self._most_tokens - sequence.num_tokens)
        held = self._held[sequence.sequence_id]
        held.guessed_at, held.guesses = sequence.num_tokens, []
        return Drafted(sequence, most, next_chance=self.mean_chance(sequence))

    def round_s(self, sequences: Sequence[EngineSequence], target_s: float) -> float:
        """What a round of these sequences is predicted to take, where a step of the target takes `target_s`."""
        times = self._fit.times
        if times is None:
            return FIRST_ROUND_SHARE * target_s
        return times.step_s(StepWork(len(sequences), sum([sequence.num_tokens for sequence in sequences])))

    def round(self, drafts: Sequence[Drafted]) -> None:
        """One guess more for each of these, but for those that there are no blocks for, or whose logits broke: they
        may have no more."""
        planned: list[tuple[Drafted, _Held]] = []
        items: list[PlannedSequence] = []
        for draft in drafts:
            held = self._held[draft.sequence.sequence_id]
            item = self._share(draft, held)
            if item is None:
                draft.most = len(draft.token_ids)
            else:
                planned.append((draft, held))
                items.append(item)
        if not items:
            return
        result = self._run(StepPlan(tuple(items)))
        for (draft, held), found in zip(planned, result.sampled, strict=True):
            newest = draft.token_ids[-1] if draft.token_ids else draft.sequence.token_ids[-1]
            if not draft.token_ids:
                self._validate(held, draft.sequence.num_tokens - 1)
            held.written.append(newest)
            if not isinstance(found, SampledToken):
                held.is_broken, draft.most = True, len(draft.token_ids)
                continue
            self._take(draft, held, found)

    def catch_up(self, sequence: EngineSequence, within_s: float) -> None:
        """Computes the next tokens of a sequence that is not ready, in about `within_s`, but a few in any case.
        Nothing where there are no blocks."""
        held = self._held.get(sequence.sequence_id) or self._add(sequence)
        self._follow(held)
        count = self._chunk(held, within_s)
        end = held.num_valid + count
        if count <= 0 or not self._grow(held, end):
            return
        tokens = tuple(sequence.token_ids[held.num_valid : end])
        item = PlannedSequence(
            sequence.sequence_id, tokens, held.num_valid, held.table, sequence.num_prompt_tokens, samples=()
        )
        held.written = []
        self._run(StepPlan((item,)))
        self._validate(held, end)

    def prompt_s(self, sequence: EngineSequence) -> float:
        """What it is predicted to take until the sequence is ready; 0 where nothing is known."""
        times, held = self._fit.times, self._held.get(sequence.sequence_id)
        before = held.num_valid if held is not None else 0
        missing = sequence.num_tokens - before
        if times is None:
            return 0.0
        num_steps = -(-missing // MOST_CHUNK)
        pairs_s = chunk_pairs(missing, before) * times.attention_s
        return num_steps * times.step_s(StepWork(0, 0, -(-missing // num_steps), 0, 1)) + pairs_s

    def take_s(self) -> float:
        """Seconds that its steps have taken since the last call."""
        taken, self._taken_s = self._taken_s, 0.0
        return taken

    def forget(self, sequence_id: str) -> None:
        """The sequence has left, or lost its blocks of the target's pool: it gives back those of this one."""
        held = self._held.pop(sequence_id, None)
        if held is not None:
            self.pool.release(held.block_ids)

    def _add(self, sequence: EngineSequence) -> _Held:
        greedy = sequence.sampling.is_greedy
        sampling = replace(
            sequence.sampling, logprobs=0, prompt_logprobs=None, structured_output=None, pooling="", stop=()
        )
        held = _Held(sequence, sampling, Record((self._means[greedy].chance(0),), _OWN_WEIGHT, _KEPT))
        self._hash(held)
        found = self.pool.match(held.hashes[: (sequence.num_tokens - 1) // self.pool.block_size])
        self.pool.acquire(found)
        held.block_ids, held.table = found, tuple(found)
        held.num_valid = len(found) * self.pool.block_size
        self._held[sequence.sequence_id] = held
        return held

    def _chunk(self, held: _Held, within_s: float) -> int:
        """Tokens that are computed of a prompt now: never the newest one, which a round begins with."""
        missing = min(held.sequence.num_tokens - 1 - held.num_valid, MOST_CHUNK)
        times = self._fit.times
        if times is None:
            return min(missing, LEAST_CHUNK)
        return max(min(missing, LEAST_CHUNK), times.largest_chunk(StepWork(), held.num_valid, within_s, missing))

    def _share(self, draft: Drafted, held: _Held) -> PlannedSequence | None:
        """A sequence's part of a round; None without blocks."""
        sequence, count = draft.sequence, len(draft.token_ids)
        end = sequence.num_tokens + count
        if not self._grow(held, end):
            return None
        start, tokens = held.num_valid, sequence.token_ids[held.num_valid :]
        if count:
            start, tokens = end - 1, draft.token_ids[-1:]
        else:
            held.written = []
        spec = SampleSpec(held.sampling, end, banned_token_ids=sequence.banned_token_ids(count))
        return PlannedSequence(
            sequence.sequence_id, tuple(tokens), start, held.table, sequence.num_prompt_tokens, samples=(spec,)
        )

    def _take(self, draft: Drafted, held: _Held, found: SampledToken) -> None:
        sequence = draft.sequence
        greedy = sequence.sampling.is_greedy
        of_class = bisect(_LEAST_PROBABILITIES, exp(found.logprob or 0.0))
        held.guesses.append((found.token_id, of_class))
        before = draft.chances[-1] if draft.chances else 1.0
        draft.token_ids.append(found.token_id)
        draft.chances.append(before * self._classes[greedy].chance(of_class))
        draft.next_chance = draft.chances[-1] * self.mean_chance(sequence)

    def _follow(self, held: _Held) -> None:
        """Takes in the tokens that came: which guesses were right, and which KV is of them. Changes nothing between
        the rounds of one step."""
        token_ids, greedy = held.sequence.token_ids, held.sequence.sampling.is_greedy
        if len(token_ids) == held.guessed_at:
            return
        for place, (guess, of_class) in enumerate(held.guesses, held.guessed_at):
            if place == len(token_ids):
                break
            right = guess == token_ids[place]
            self._classes[greedy].add(of_class, right)
            self._means[greedy].add(0, right)
            held.means.add(0, right)
            if not right:
                break
        held.guesses = []
        if held.written:
            end = held.num_valid
            for token_id in held.written:
                # A round begins with the newest token, whether or not its KV is known.
                if end == len(token_ids) - 1 or token_ids[end] != token_id:
                    break
                end += 1
            held.written = []
            self._validate(held, end)

    def _validate(self, held: _Held, num_tokens: int) -> None:
        """The KV of the sequence's first `num_tokens` is there."""
        before, block_size = held.num_valid // self.pool.block_size, self.pool.block_size
        held.num_valid = num_tokens
        full = num_tokens // block_size
        if full > before:
            self._hash(held)
            for index in range(before, full):
                if self.pool.hash_of(held.block_ids[index]) is None:
                    self.pool.seal(held.block_ids[index], held.hashes[index])

    def _hash(self, held: _Held) -> None:
        extend_chain(held.hashes, held.sequence.hash_root, held.sequence.token_ids, self.pool.block_size)

    def _grow(self, held: _Held, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.pool.block_size) - len(held.block_ids)
        if missing > 0:
            try:
                held.block_ids += self.pool.allocate(missing)
            except OutOfBlocks:
                return False
            held.table = tuple(held.block_ids)
        return True

    def _run(self, plan: StepPlan) -> StepResult:
        begun = self._clock()
        result = self._runner.execute(plan)
        seconds = self._clock() - begun
        self._fit.observe(step_work(plan), seconds)
        self._taken_s += seconds
        self.total_s += seconds
        self.pool.drain_events()  # no index knows of these blocks
        return result
