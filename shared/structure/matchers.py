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
    """One answer that needs a mask for its next token, and one behind each guess of what comes next."""

    sequence_id: str
    structure: StructuredOutput
    num_output_tokens: int  # before the next one
    newest: int | None  # the last of them; None where there is none
    known: tuple[int, ...]  # all of them from the first on, or none where the state is not older than it may be
    banned_token_ids: tuple[tuple[int, ...], ...]  # of each mask, removed where another token is left
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # likewise the last token of each, behind the others
    guesses: tuple[int, ...] = ()


class Masks(NamedTuple):
    """The tokens with which each answer may continue, by row, its guesses' rows behind its own.

    Behind a guess that is not allowed, or that ends the answer, nothing counts: all bits are set there.
    """

    words: NDArray[np.int32]  # [num_rows, num_words], bit i % 32 of word i // 32: token id i is allowed
    faults: dict[int, str]  # rows that cannot continue, and why; all their bits are set


@dataclass(slots=True)
class _State:
    structure: StructuredOutput
    matcher: LLMatcher
    tokens: list[int]
    last_step: int
    guesses: tuple[int, ...] = ()  # of the last step; those that were right are tokens that no row tells of


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
        """The masks of this step's answers. Waits for structures that are still being compiled."""
        faults: dict[int, str] = {}
        matchers: list[tuple[LLMatcher, int]] = []
        guessing: list[tuple[_State, int]] = []
        banned: list[tuple[int, ...]] = []
        owners: list[tuple[StructuredRow, int]] = []  # of each mask, and the guesses before it
        for row in rows:
            index = len(banned)
            banned += row.banned_token_ids
            owners += [(row, count) for count in range(len(row.banned_token_ids))]
            try:
                state = self._advance(row)
            except TandemError as error:
                faults[index] = error.message
                continue
            matchers.append((state.matcher, index))
            if row.guesses:
                guessing.append((state, index))
        words = np.full((len(banned), self._compiler.num_words), -1, dtype=np.int32)
        self._compute(matchers, words)
        for matcher, index in matchers:
            self._check(matcher, index, words, faults)
        for state, index in guessing:
            if index not in faults:
                self._look_ahead(state, index, words, faults)
        for index, token_ids in enumerate(banned):
            row, count = owners[index]
            if index in faults:
                words[index] = -1
            elif not row.bad_sequences or row.sequence_id not in self._states:
                _ban(words[index], token_ids)
            else:
                tokens = [*self._states[row.sequence_id].tokens, *row.guesses[:count]]
                _ban(words[index], (*token_ids, *_completing(row.bad_sequences, tokens)))
        return Masks(words, faults)

    def _look_ahead(self, state: _State, index: int, words: NDArray[np.int32], faults: dict[int, str]) -> None:
        """The masks behind the guesses, in the rows behind `index`, as far as the structure allows them. Afterwards the
        state is as before."""
        taken, matcher = 0, state.matcher
        for place, guess in enumerate(state.guesses, index + 1):
            # One that has stopped takes nothing but the answer's end, and does not count that as a token.
            if matcher.is_stopped() or not _allows(words[place - 1], guess) or not matcher.consume_token(guess):
                break
            taken += 1
            if matcher.stop_reason() == "EndOfSentence":
                break
            self._compute([(matcher, place)], words)
            if not self._check(matcher, place, words, faults):
                break
        if matcher.is_error():  # by a guess that need not come true
            state.matcher = self._begun(state.structure, state.tokens)
        elif taken:
            matcher.rollback(taken)

    @staticmethod
    def _check(matcher: LLMatcher, index: int, words: NDArray[np.int32], faults: dict[int, str]) -> bool:
        """Whether the row's mask allows any token; else the reason is among the faults."""
        fault = fault_of(matcher)
        if fault is None and not words[index].any():
            fault = "no token of the vocabulary continues it"
        if fault is not None:
            faults[index] = fault
        return fault is None

    def _begun(self, structure: StructuredOutput, tokens: Sequence[int]) -> LLMatcher:
        matcher = self._compiler.compile(structure).deep_copy()
        matcher.consume_tokens(list(tokens))
        return matcher

    def _advance(self, row: StructuredRow) -> _State:
        """The state behind the answer's newest token. Raises InvalidRequest, Internal."""
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
            state = _State(row.structure, self._begun(row.structure, tokens), tokens, self._step)
            self._states[row.sequence_id] = state
        elif len(state.tokens) < row.num_output_tokens:
            assert row.newest is not None
            for token_id in (*state.guesses[: row.num_output_tokens - len(state.tokens) - 1], row.newest):
                state.tokens.append(token_id)
                # Behind its end token, an answer takes no more: a step ahead computes it once again, for nothing.
                if state.matcher.stop_reason() != "EndOfSentence":
                    state.matcher.consume_token(token_id)
        state.last_step, state.guesses = self._step, row.guesses
        return state

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
    """Whether the row is the same answer: no token further, or one behind some of the last step's guesses."""
    num_tokens, num_new = len(state.tokens), row.num_output_tokens - len(state.tokens)
    if state.structure != row.structure or not 0 <= num_new <= 1 + len(state.guesses):
        return False
    return not row.known or state.tokens[: len(row.known)] == list(row.known[:num_tokens])


def _completing(bad_sequences: Sequence[tuple[int, ...]], tokens: list[int]) -> list[int]:
    """Tokens that would complete a bad sequence behind these."""
    return [bad[-1] for bad in bad_sequences if len(bad) == 1 or tuple(tokens[1 - len(bad) :]) == bad[:-1]]


def _allows(words: NDArray[np.int32], token_id: int) -> bool:
    """Whether a mask has the token."""
    return token_id < 32 * len(words) and bool(words.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & 1)


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
