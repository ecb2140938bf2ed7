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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.engine.plan import PlannedSequence, SampledToken, StepPlan, StepResult, step_work
from shared.engine.sequence import EngineSequence
from shared.engine.speculation.guessing_model import Drafted, GuessingModel, GuessRecord
from shared.kv.hashing import extend_chain
from shared.kv.pool import BlockPool, OutOfBlocks
from shared.sizing.step_time import StepWork, chunk_pairs

FEW_TOKENS = 8
"""Tokens without KV that a sequence may have for a round to begin with it; more are computed in spare time before."""
LEAST_CHUNK, MOST_CHUNK = 16, 512
"""Tokens of a prompt that are computed at once, however short or long the time is."""


class DraftRunner(Protocol):
    """Computes steps of the draft over its pool."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Writes the KV of the plan's tokens, and chooses a token where the plan has a sample."""
        ...


@dataclass(slots=True)
class _Held:
    """What the draft has of one sequence."""

    sequence: EngineSequence
    record: GuessRecord
    block_ids: list[int] = field(default_factory=list)
    table: tuple[int, ...] = ()  # the same, made anew where those grew
    hashes: list[bytes] = field(default_factory=list)  # of full blocks
    num_valid: int = 0  # tokens of the sequence whose KV the blocks hold
    written: list[int] = field(default_factory=list)  # behind these, the newest token and guesses that have KV as well
    is_broken: bool = False  # its logits were no numbers


class DraftModel(GuessingModel):
    """The draft's sequences, blocks and rounds. The engine thread alone calls it."""

    method = "draft"

    def __init__(
        self,
        runner: DraftRunner,
        pool: BlockPool,
        most_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`runner` computes over the blocks of `pool`, which nothing else uses. `most_tokens`: of a sequence that the
        draft has positions for. `clock`: in seconds."""
        super().__init__(clock)
        self.pool = pool
        self._runner = runner
        self._most_tokens = most_tokens
        self._held: dict[str, _Held] = {}

    def takes(self, sequence: EngineSequence) -> bool:
        """Whether it may guess for this sequence at all."""
        held = self._held.get(sequence.sequence_id)
        return sequence.num_tokens < self._most_tokens and (held is None or not held.is_broken)

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
        return self._begin(sequence, held.record, most)

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
            self._take(draft, held.record, found)

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

    def forget(self, sequence_id: str) -> None:
        """The sequence has left, or lost its blocks of the target's pool: it gives back those of this one."""
        held = self._held.pop(sequence_id, None)
        if held is not None:
            self.pool.release(held.block_ids)

    def _record(self, sequence_id: str) -> GuessRecord | None:
        held = self._held.get(sequence_id)
        return None if held is None else held.record

    def _add(self, sequence: EngineSequence) -> _Held:
        held = _Held(sequence, self._new_record(sequence))
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
        spec = self._spec(draft, held.record)
        return PlannedSequence(
            sequence.sequence_id, tuple(tokens), start, held.table, sequence.num_prompt_tokens, samples=(spec,)
        )

    def _follow(self, held: _Held) -> None:
        """Takes in the tokens that came: which guesses were right, and which KV is of them. Changes nothing between
        the rounds of one step."""
        token_ids = held.sequence.token_ids
        if len(token_ids) == held.record.guessed_at:
            return
        self._learn(held.sequence, held.record)
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
        self._timed(step_work(plan), begun)
        self.pool.drain_events()  # no index knows of these blocks
        return result
