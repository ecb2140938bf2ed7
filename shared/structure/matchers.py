"""Which tokens may come next in a structured answer: a function of the structure and of the answer's tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import Internal, TandemError
from shared.structure.compiler import StructureCompiler, fault_of
from shared.structure.structured_output import STRUCTURE_MEMORY_PLANS, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class StructuredRow(NamedTuple):
    """One answer that needs a mask for its next token."""

    sequence_id: str
    structure: StructuredOutput
    num_output_tokens: int  # before the next one
    newest: int | None  # the last of them; None where there is none
    known: tuple[int, ...]  # all of them from the first on, or none where the state is not older than it may be
    banned_token_ids: tuple[int, ...]  # removed where another token is left
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # likewise the last token of each, behind the others


class Masks(NamedTuple):
    """The tokens with which each row may continue."""

    words: NDArray[np.int32]  # [num_rows, num_words], bit i % 32 of word i // 32: token id i is allowed
    faults: dict[int, str]  # rows that cannot continue, and why; all their bits are set


@dataclass(slots=True)
class _State:
    structure: StructuredOutput
    matcher: LLMatcher
    tokens: list[int]
    last_step: int


class SequenceMatchers:
    """The states of the answers of one runner. For one thread at a time."""

    def __init__(self, compiler: StructureCompiler, num_threads: int = 1) -> None:
        """`num_threads` fill the masks of a batch."""
        self._compiler = compiler
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None
        self._states: dict[str, _State] = {}
        self._step = 0

    def begin_step(self) -> None:
        """Called once for each plan, whether it has structured answers or not: what was not used lately is dropped."""
        self._step += 1
        if self._states:
            oldest = self._step - STRUCTURE_MEMORY_PLANS
            self._states = {name: state for name, state in self._states.items() if state.last_step >= oldest}

    def fill(self, rows: Sequence[StructuredRow]) -> Masks:
        """The masks of this step's rows. Waits for structures that are still being compiled."""
        faults: dict[int, str] = {}
        matchers: list[tuple[LLMatcher, int]] = []
        for index, row in enumerate(rows):
            try:
                matchers.append((self._advance(row), index))
            except TandemError as error:
                faults[index] = error.message
        words = np.full((len(rows), self._compiler.num_words), -1, dtype=np.int32)
        self._compute(matchers, words)
        for matcher, index in matchers:
            fault = fault_of(matcher)
            if fault is not None:
                faults[index] = fault
            elif not words[index].any():
                faults[index] = "no token of the vocabulary continues it"
            else:
                row = rows[index]
                completing = _completing(row.bad_sequences, self._states[row.sequence_id].tokens)
                _ban(words[index], (*row.banned_token_ids, *completing))
        for index in faults:
            words[index] = -1
        return Masks(words, faults)

    def _advance(self, row: StructuredRow) -> LLMatcher:
        """The matcher behind the answer's newest token. Raises InvalidRequest, Overloaded, Internal."""
        if row.newest is not None and row.newest < 0:
            raise Internal("its newest token could not be chosen")
        state = self._states.get(row.sequence_id)
        if state is not None and not _continues(state, row):
            state = None
        if state is None:
            tokens = list(row.known)
            if row.newest is not None and len(tokens) < row.num_output_tokens:
                tokens.append(row.newest)
            if len(tokens) != row.num_output_tokens:  # of an answer that failed one step earlier
                raise Internal(f"{len(tokens)} of its {row.num_output_tokens} tokens are known")
            state = _State(row.structure, self._compiler.compile(row.structure).deep_copy(), tokens, self._step)
            self._states[row.sequence_id] = state
            state.matcher.consume_tokens(tokens)
        elif len(state.tokens) < row.num_output_tokens:
            assert row.newest is not None
            state.tokens.append(row.newest)
            # Behind its end token, an answer takes no more: a step ahead computes it once again, for nothing.
            if state.matcher.stop_reason() != "EndOfSentence":
                state.matcher.consume_token(row.newest)
        state.last_step = self._step
        return state.matcher

    def _compute(self, matchers: Sequence[tuple[LLMatcher, int]], words: NDArray[np.int32]) -> None:
        begin, row_bytes = words.ctypes.data, words.shape[1] * words.itemsize
        if self._num_threads == 1 or len(matchers) < 2:
            for matcher, index in matchers:
                matcher.unsafe_compute_mask_ptr(begin + index * row_bytes, row_bytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        self._executor.unsafe_compute_mask_ptr(list(matchers), begin, row_bytes, len(words))


def _continues(state: _State, row: StructuredRow) -> bool:
    """Whether the row is the same answer, no token or one further."""
    num_tokens = len(state.tokens)
    if state.structure != row.structure or not row.num_output_tokens - 1 <= num_tokens <= row.num_output_tokens:
        return False
    return not row.known or state.tokens[: len(row.known)] == list(row.known[:num_tokens])


def _completing(bad_sequences: Sequence[tuple[int, ...]], tokens: list[int]) -> list[int]:
    """Tokens that would complete a bad sequence behind these."""
    return [bad[-1] for bad in bad_sequences if len(bad) == 1 or tuple(tokens[1 - len(bad) :]) == bad[:-1]]


def _ban(words: NDArray[np.int32], token_ids: Sequence[int]) -> None:
    """Clears the bits of these tokens, unless nothing were left."""
    if not token_ids:
        return
    left = words.view(np.uint32).copy()
    for token_id in token_ids:
        if token_id < 32 * len(left):
            left[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
    if left.any():
        words[:] = left.view(np.int32)
