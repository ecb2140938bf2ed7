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

from shared.engine.plan import LaunchedStep, PlannedSequence, StepPlan, StepResult, step_work
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

    @property
    def is_async(self) -> bool:
        """Whether `launch` returns before the step is computed."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Writes the KV of the plan's tokens, and chooses a token where the plan has a sample."""
        ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begins likewise. `pending` tokens are those of the step before. One more may be launched before this one's
        result is taken."""
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
        self.is_queued = runner.is_async
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

    def will_be_ready(self, sequence: EngineSequence) -> bool:
        """See `GuessingModel`. Learns likewise."""
        held = self._held.get(sequence.sequence_id)
        if held is None:
            return False
        self._follow(held)
        return sequence.num_tokens + sequence.num_in_flight_samples - held.num_valid <= FEW_TOKENS

    def begin(self, sequence: EngineSequence, most: int) -> Drafted:
        """Before the rounds of a sequence that is ready; `most`: guesses."""
        most = min(most, self._most_tokens - sequence.num_tokens)
        held = self._held[sequence.sequence_id]
        return self._begin(sequence, held.record, most)

    def round(self, drafts: Sequence[Drafted], count: int = 1) -> None:
        """`count` guesses more for each of these, but for those that there are no blocks for, or whose logits broke:
        they may have no more."""
        planned: list[tuple[Drafted, _Held]] = []
        shares: list[list[PlannedSequence]] = []
        for draft in drafts:
            held = self._held[draft.sequence.sequence_id]
            share = self._shares(draft, held, count, len(planned))
            if not share:
                draft.most = len(draft.token_ids)
            else:
                planned.append((draft, held))
                shares.append(share)
        if not planned:
            return
        results = self._run([StepPlan(items) for items in zip(*shares, strict=True)])
        for row, (draft, held) in enumerate(planned):
            newest = draft.token_ids[-1] if draft.token_ids else draft.sequence.token_ids[-1]
            if not draft.token_ids:
                self._validate(held, draft.sequence.num_tokens - 1)
            num_before = len(draft.token_ids)
            if not self._take_all(draft, held.record, [result.sampled[row] for result in results]):
                held.is_broken = True
            held.written += [newest, *draft.token_ids[num_before:]][:count]

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
        self._run([StepPlan((item,))])
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

    def _shares(self, draft: Drafted, held: _Held, count: int, row: int) -> list[PlannedSequence]:
        """A sequence's parts of `count` rounds, in each as the sequence of number `row`; none without blocks."""
        sequence, num_before = draft.sequence, len(draft.token_ids)
        end = sequence.num_tokens + num_before
        if not self._grow(held, end + count - 1):
            return []
        start, tokens = held.num_valid, sequence.token_ids[held.num_valid :]
        if num_before:
            start, tokens = end - 1, draft.token_ids[-1:]
        else:
            held.written = []
        spec, *later = self._specs(draft, held.record, count)
        first = PlannedSequence(
            sequence.sequence_id, tuple(tokens), start, held.table, sequence.num_prompt_tokens, samples=(spec,)
        )
        return [
            first,
            *(
                first._replace(token_ids=(0,), start=place, samples=(spec,), pending=row)
                for place, spec in enumerate(later, end)
            ),
        ]

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

    def _run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        """Steps one behind the other; where there are several, each is launched before the one before is known."""
        begun = self._clock()
        if len(plans) == 1:
            results = [self._runner.execute(plans[0])]
        else:
            results, before = [], None
            for plan in plans:
                step = self._runner.launch(plan)
                if before is not None:
                    results.append(before.result())
                before = step
            assert before is not None
            results.append(before.result())
        self._timed(step_work(plans[0]), begun, len(plans))
        self.pool.drain_events()  # no index knows of these blocks
        return results
