"""Guesses of a checkpoint's head: from what the model's own step gave, one layer says the token after the next one, and
again from what it gave itself.

Its KV is a layer of the sequences' blocks, written with each step; that of a guess lies behind all that is valid, where
the next step writes. So there is nothing to catch up with, to hand over or to take back. Pure policy: `runner` has the
tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from shared.engine.plan import NoToken, SampledToken, SampleSpec
from shared.engine.sequence import EngineSequence
from shared.engine.speculation.guessing_model import Drafted, GuessingModel, GuessRecord
from shared.kv.groups import KVGroups
from shared.sizing.step_time import StepWork


class HeadGuess(NamedTuple):
    """Guesses to be made: the first from the model's state at a position, or from the guess before, each further one
    from that before it."""

    sequence_id: str
    position: int  # of the state, or where the KV of the guess before goes
    token_id: int | None  # the guess before; None: the model's state
    specs: tuple[SampleSpec, ...]  # of each guess
    block_ids: tuple[int, ...]  # covers that position, and those of the further guesses


class HeadRunner(Protocol):
    """Computes a head over the blocks of its model's pool."""

    def is_ready(self, sequence_id: str, position: int) -> bool:
        """Whether the last step has computed this sequence at that position, and kept what the head gives there."""
        ...

    @property
    def is_queued(self) -> bool:
        """Whether a device computes it, several guesses of a sequence without the host."""
        ...

    def guess(self, guesses: Sequence[HeadGuess]) -> Sequence[Sequence[SampledToken | NoToken]]:
        """For each as many tokens as it has specs, which are as many for all; writes the KV of the guesses that others
        are from."""
        ...


class HeadModel(GuessingModel):
    """The head's guesses for all sequences. The engine thread alone calls it."""

    method = "heads"
    follows_steps = True
    writes_ahead = True

    def __init__(
        self, runner: HeadRunner, groups: KVGroups, most_tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`groups`: of the sequences' blocks. `most_tokens`: of a sequence that the model has positions for. `clock`:
        in seconds."""
        super().__init__(clock)
        self._runner = runner
        self.is_queued = runner.is_queued
        self._groups = groups
        self._most_tokens = most_tokens
        self._records: dict[str, GuessRecord] = {}
        self._broken: set[str] = set()

    def takes(self, sequence: EngineSequence) -> bool:
        """See `GuessingModel`."""
        return sequence.num_tokens < self._most_tokens and sequence.sequence_id not in self._broken

    def is_ready(self, sequence: EngineSequence) -> bool:
        """See `GuessingModel`: the step before has computed its newest token but one."""
        record = self._records.get(sequence.sequence_id)
        if record is None:
            record = self._records[sequence.sequence_id] = self._new_record(sequence)
        if sequence.num_tokens != record.guessed_at:
            self._learn(sequence, record)
        return self._runner.is_ready(sequence.sequence_id, sequence.num_tokens - 2)

    def will_be_ready(self, sequence: EngineSequence) -> bool:
        """See `GuessingModel`: the step in flight computes its newest known token."""
        return self._runner.is_ready(sequence.sequence_id, sequence.num_tokens + sequence.num_in_flight_samples - 2)

    def begin(self, sequence: EngineSequence, most: int) -> Drafted:
        """See `GuessingModel`. Guesses have KV in the blocks that the sequence holds; the first one has none yet, and
        the last one never."""
        num_places = len(sequence.block_ids) // self._groups.size * self._groups.block_size
        room = num_places - sequence.num_tokens + 2
        most = min(most, room, self._most_tokens - sequence.num_tokens)
        return self._begin(sequence, self._records[sequence.sequence_id], most)

    def round(self, drafts: Sequence[Drafted], count: int = 1) -> None:
        """See `GuessingModel`."""
        if not drafts:
            return
        begun_s = self._clock()
        found = self._runner.guess([self._guess(draft, count) for draft in drafts])
        self._timed(StepWork(len(drafts), sum([draft.sequence.num_tokens for draft in drafts])), begun_s, count)
        for draft, tokens in zip(drafts, found, strict=True):
            if not self._take_all(draft, self._records[draft.sequence.sequence_id], tokens):
                self._broken.add(draft.sequence.sequence_id)

    def forget(self, sequence_id: str) -> None:
        """See `GuessingModel`."""
        self._records.pop(sequence_id, None)
        self._broken.discard(sequence_id)

    def _record(self, sequence_id: str) -> GuessRecord | None:
        return self._records.get(sequence_id)

    def _guess(self, draft: Drafted, count: int) -> HeadGuess:
        sequence, num_before = draft.sequence, len(draft.token_ids)
        end = sequence.num_tokens + num_before
        specs = self._specs(draft, self._records[sequence.sequence_id], count)
        newest = draft.token_ids[-1] if num_before else None
        return HeadGuess(sequence.sequence_id, end - 2, newest, specs, sequence.table())
