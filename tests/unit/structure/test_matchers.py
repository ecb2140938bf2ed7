"""An answer's state is a function of its tokens: kept, made anew, or gone on with elsewhere, it has the same masks."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.structure.compiler import StructureCompiler
from shared.structure.matchers import SequenceMatchers, StructuredRow
from shared.structure.structured_output import STRUCTURE_MEMORY_PLANS, StructuredOutput, StructureKind
from tests.examples import examples
from tests.random_schemas import random_schema

DIGITS = StructuredOutput(StructureKind.REGEX, "[0-9]{2,9}")


def schema(seed: int) -> StructuredOutput:
    return StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(random_schema(seed)))


def row(
    structure: StructuredOutput,
    tokens: list[int],
    *,
    name: str = "a",
    known: bool = False,
    pending: bool = False,
    banned: tuple[int, ...] = (),
    guesses: tuple[int, ...] = (),
) -> StructuredRow:
    given = tokens[:-1] if pending else tokens
    return StructuredRow(
        name,
        structure,
        len(tokens),
        tokens[-1] if tokens else None,
        tuple(given) if known else (),
        (banned,) * (1 + len(guesses)),
        guesses=guesses,
    )


def allowed(matchers: SequenceMatchers, *rows: StructuredRow) -> list[list[int]]:
    """Token ids of each row's mask."""
    matchers.begin_step()
    masks = matchers.fill(rows)
    assert masks.faults == {}
    return [np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() for words in masks.words]


@examples(15)
@given(seed=st.integers(0, 10_000), draws=st.integers(0, 10_000))
def test_masks_are_a_function_of_the_tokens(
    compiler: StructureCompiler, eos_token_ids: tuple[int, ...], seed: int, draws: int
) -> None:
    """One answer followed step by step, beside others, and begun anew from all of its tokens."""
    structure, choose, tokens = schema(seed), Random(draws), []
    kept, beside, ahead = (SequenceMatchers(compiler) for _ in range(3))
    for length in range(40):
        (mask,) = allowed(kept, row(structure, tokens, known=length == 0))
        mate = row(DIGITS, [], name=f"mate {length}")
        assert allowed(beside, mate, row(structure, tokens, known=True))[1] == mask
        assert allowed(ahead, row(structure, tokens, known=True, pending=True)) == [mask]
        assert allowed(SequenceMatchers(compiler, num_threads=2), row(structure, tokens, known=True), mate)[0] == mask
        assert set(mask).isdisjoint(eos_token_ids) or set(eos_token_ids) <= set(mask)
        tokens.append(choose.choice(mask))
        if tokens[-1] in eos_token_ids:
            break


def test_what_was_not_used_lately_is_forgotten(compiler, tokenizer):
    matchers, tokens = SequenceMatchers(compiler), tokenizer.encode("12", add_special_tokens=False)
    expected = allowed(matchers, row(DIGITS, tokens, known=True))
    for _ in range(STRUCTURE_MEMORY_PLANS - 1):
        matchers.begin_step()
    assert allowed(matchers, row(DIGITS, tokens)) == expected
    for _ in range(STRUCTURE_MEMORY_PLANS):
        matchers.begin_step()
    matchers.begin_step()
    assert "tokens are known" in matchers.fill([row(DIGITS, tokens)]).faults[0]
    assert allowed(matchers, row(DIGITS, tokens, known=True)) == expected


def test_an_id_that_is_given_anew_begins_anew(compiler, tokenizer):
    matchers = SequenceMatchers(compiler)
    seven, nine = (tokenizer.encode(text, add_special_tokens=False) for text in ("1234567", "999"))
    allowed(matchers, row(DIGITS, seven, known=True))
    fresh = SequenceMatchers(compiler)
    assert allowed(matchers, row(DIGITS, nine, known=True)) == allowed(fresh, row(DIGITS, nine, known=True))
    assert allowed(matchers, row(DIGITS, [])) == allowed(fresh, row(DIGITS, [], name="b"))


def test_a_token_that_does_not_belong_fails_its_row_alone(compiler, tokenizer):
    matchers = SequenceMatchers(compiler)
    letter = tokenizer.encode("x", add_special_tokens=False)
    rows = [row(DIGITS, letter, known=True), row(DIGITS, [], name="b"), row(DIGITS, [-1], name="c", known=True)]
    matchers.begin_step()
    masks = matchers.fill(rows)
    assert set(masks.faults) == {0, 2}
    assert (masks.words[0] == -1).all()
    assert (masks.words[1] != -1).any()
    assert set(matchers.fill(rows[:1]).faults) == {0}  # also a step later


def test_banned_tokens_are_left_out_unless_nothing_else_is_left(compiler, tokenizer, eos_token_ids):
    matchers, full = SequenceMatchers(compiler), tokenizer.encode("123456789", add_special_tokens=False)
    two = tokenizer.encode("12", add_special_tokens=False)
    (free,) = allowed(matchers, row(DIGITS, two, known=True))
    assert set(eos_token_ids) <= set(free)
    (banned,) = allowed(matchers, row(DIGITS, two, known=True, banned=(*eos_token_ids, 10**6)))
    assert set(banned) == set(free) - set(eos_token_ids)
    assert allowed(matchers, row(DIGITS, full, name="b", known=True, banned=eos_token_ids)) == [sorted(eos_token_ids)]


def test_behind_its_end_an_answer_stays_ended(compiler, tokenizer, eos_token_ids):
    """A step ahead computes such an answer once more."""
    matchers, tokens = SequenceMatchers(compiler), tokenizer.encode("12", add_special_tokens=False)
    allowed(matchers, row(DIGITS, tokens, known=True))
    tokens.append(eos_token_ids[0])
    assert allowed(matchers, row(DIGITS, tokens)) == [sorted(eos_token_ids)]
    assert allowed(matchers, row(DIGITS, [*tokens, eos_token_ids[0]])) == [sorted(eos_token_ids)]


@pytest.mark.parametrize("seed", range(12))
def test_random_schemas_compile(compiler, seed):
    assert compiler.compile(schema(seed)).deep_copy().compute_bitmask()


@examples(20)
@given(seed=st.integers(0, 10_000), draws=st.integers(0, 10_000))
def test_masks_behind_guesses_are_those_of_the_answer_that_they_make(
    compiler: StructureCompiler, eos_token_ids: tuple[int, ...], seed: int, draws: int
) -> None:
    """Right guesses and wrong ones; the next step knows nothing of them but the newest token."""
    structure, choose, tokens = schema(seed), Random(draws), []
    kept = SequenceMatchers(compiler)
    while len(tokens) < 40:
        guesses: list[int] = []
        for _ in range(choose.randrange(6)):
            (mask,) = allowed(SequenceMatchers(compiler), row(structure, [*tokens, *guesses], known=True))
            guesses.append(choose.choice(mask) if choose.random() < 0.8 else choose.randrange(3000))
            if guesses[-1] in eos_token_ids or guesses[-1] not in mask:
                break
        guesses += [5] * choose.randrange(2)
        masks = allowed(kept, row(structure, tokens, known=not tokens, guesses=tuple(guesses)))
        assert len(masks) == 1 + len(guesses)
        num_right = 0
        while True:
            (expected,) = allowed(SequenceMatchers(compiler), row(structure, tokens, known=True))
            assert masks[num_right] == expected
            follows = num_right < len(guesses) and guesses[num_right] in expected and choose.random() < 0.9
            tokens.append(guesses[num_right] if follows else choose.choice(expected))
            if tokens[-1] in eos_token_ids:
                return
            if not follows:
                break
            num_right += 1
