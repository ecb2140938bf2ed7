"""Messages between scheduler and runner: an immutable plan, and its result.

What a step has for every sequence is a NamedTuple: made several times faster than a frozen dataclass, and once more in
half the time by `tuple.__new__` with all of its fields, as where a step makes one for each of hundreds of sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, NumericalFault, TandemError
from shared.sizing.step_time import StepWork, chunk_pairs


class SampleSpec(NamedTuple):
    """How to choose one token from one row of logits.

    The runner follows what earlier tokens do to the next one. So the tokens known so far are given only where it
    starts: prompt and output of a sequence with penalties that the plan before did not sample for, and the output of a
    structured answer that none of the last STRUCTURE_MEMORY_PLANS plans sampled for. Rows behind guesses have none: the
    first row of their sequence has what all need.
    """

    params: SamplingParams
    position: int  # index of the token to be produced, in the sequence
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()


class PlannedSequence(NamedTuple):
    """A sequence's share of one step: compute `token_ids` at positions start … start + len - 1.

    Planned while the step before still runs, a sequence's newest token may not be known yet: then `token_ids` holds
    one 0 in its place, and `pending` is the index of that token among those that the step before samples.

    With several `samples` the last tokens are guesses, one fewer than samples: a token is chosen behind the newest
    known one and behind each guess, and counts as long as the guesses before it are what was chosen there.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    start: int  # = num_computed_tokens before the step
    block_ids: tuple[int, ...]  # block table, covering every position up to the last computed one
    num_prompt_tokens: int
    samples: tuple[SampleSpec, ...]  # of the last rows; one where the step reaches the last token, more with guesses
    pending: int | None = None  # index among the tokens sampled by the step before
    targets: tuple[int, ...] = ()  # prompt tokens behind the first ones of these, whose log-probabilities are asked for
    num_alternatives: int = 0  # likeliest tokens beside each target
    num_pooled: int = 0  # last tokens of these whose hidden states are summed
    adapter: int = 0  # slot of its adapter on the worker, from 1; 0 = none
    following: int = 0  # the token behind these, where none is chosen there
    guess_states: tuple[int, ...] = ()  # of each guess a block of each group of states, for the state behind it

    @property
    def end(self) -> int:
        """num_computed_tokens after the step, where no guess is wrong."""
        return self.start + len(self.token_ids)

    @property
    def guesses(self) -> tuple[int, ...]:
        """The guessed tokens: the last ones."""
        return self.token_ids[1 - len(self.samples) :] if len(self.samples) > 1 else ()

    @property
    def is_decode(self) -> bool:
        """Whether it only continues its answer: by its newest token, and guesses behind that."""
        return self.start >= self.num_prompt_tokens and len(self.token_ids) == (len(self.samples) or 1)

    def num_kept(self, chosen: Sequence[SampledToken | NoToken]) -> int:
        """How many of the tokens chosen for its samples count, the first ones: all up to the first that is not
        what was guessed in its place."""
        kept = 1
        for guess, found in zip(self.guesses, chosen, strict=False):
            if not isinstance(found, SampledToken) or found.token_id != guess:
                break
            kept += 1
        return kept


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block of the pool to a slot in host memory, or back; or to another block of the pool."""

    block_id: int
    host_slot: int
    to_host: bool
    source_id: int | None = None  # the block that is copied to `block_id`; no slot is used then


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step: copies in their order, then decodes and chunks of prompts as one batch."""

    sequences: tuple[PlannedSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    begins_guesses: bool = False
    """Whether a head keeps what it guesses with behind the chosen tokens; else it writes its KV alone."""
    num_tokens: int = field(init=False, compare=False)
    """Tokens computed in this step, over all sequences."""
    num_guesses: int = field(init=False, compare=False)
    """Guesses of the answers' next tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum([len(item.token_ids) for item in self.sequences]))
        guesses = [len(item.samples) - 1 for item in self.sequences if len(item.samples) > 1]
        object.__setattr__(self, "num_guesses", sum(guesses))

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and those that are computed again; the others continue answers."""
        if self.num_tokens == len(self.sequences):  # as in most steps
            return sum([item.start < item.num_prompt_tokens for item in self.sequences])
        return sum([len(item.token_ids) for item in self.sequences if not item.is_decode])

    @property
    def is_empty(self) -> bool:
        """True for a plan without sequences and copies."""
        return not self.sequences and not self.copies


class SampledToken(NamedTuple):
    """The token chosen for one row of logits. Log-probabilities are of the unmodified logits."""

    token_id: int
    logprob: float | None = None  # None unless asked for
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), likeliest first
    pooled: bytes = b""  # [hidden_size] fp32, of a prompt of which that was asked for


@dataclass(frozen=True, slots=True)
class NoToken:
    """Nothing could be chosen from a row: its logits held NaN or +inf, or nothing finite, or its structure failed."""

    source: str | None = None  # the first part of the model that gave such numbers, where the runner looks for it
    structure: str | None = None  # why no token can continue a structured answer

    def error(self, position: int) -> TandemError:
        """The error that fails its sequence; `position` is that of the token that could not be chosen."""
        if self.structure is not None:
            return InvalidRequest(
                f"structured_output cannot be followed beyond token {position}: {self.structure}",
                field="structured_output",
                position=position,
            )
        where = f", first in its {self.source}" if self.source else ""
        return NumericalFault(
            f"the model gave NaN or infinite numbers for token {position}{where}: nothing can be chosen",
            position=position,
            source=self.source,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """One token for each SampleSpec of the plan, in its order; of the sequences with targets, these."""

    sampled: tuple[SampledToken | NoToken, ...]
    targets: tuple[tuple[SampledToken, ...], ...] = ()
    pooled: tuple[NDArray[np.float32], ...] = ()
    """[hidden_size], the sum over `num_pooled` hidden states, of those that have any."""


class LaunchedStep(Protocol):
    """A step that was handed to the device."""

    def result(self) -> StepResult:
        """Waits until the step is done; called once, in the order of the launches."""
        ...


def decode_work(items: Collection[PlannedSequence]) -> StepWork:
    """The work of a step that only decodes, without its guesses."""
    return StepWork(len(items), sum([item.start + 1 for item in items]))


def step_work(plan: StepPlan) -> StepWork:
    """A sequence that computes one token counts as one that decodes, wherever the token comes from: it reads the KV
    of all before it. One with guesses counts as a chunk."""
    if plan.num_tokens == len(plan.sequences):
        return decode_work(plan.sequences)
    num_sequences = num_context = num_chunk = num_pairs = 0
    for item in plan.sequences:
        count = len(item.token_ids)
        if count == 1:
            num_sequences += 1
            num_context += item.start + 1
        else:
            num_chunk += count
            num_pairs += chunk_pairs(count, item.start)
    return StepWork(num_sequences, num_context, num_chunk, num_pairs, len(plan.sequences) - num_sequences)
