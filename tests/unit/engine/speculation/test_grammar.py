"""Guesses from an answer's structure."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest

from shared.engine.speculation.grammar import GrammarDrafter
from shared.errors import InvalidRequest, Overloaded
from shared.model.families.registry import load_config
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler
from shared.structure.structured_output import StructuredOutput, StructureKind
from tests.demo import DEMO
from tests.unit.engine.builders import sequence

SCHEMA = {"type": "object", "properties": {"father_name": {"const": "Abraham"}}, "required": ["father_name"]}
STRUCTURE = StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps({**SCHEMA, "additionalProperties": False}))


EOS = load_config(DEMO).eos_token_ids[0]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEMO)


@pytest.fixture
def drafter(tokenizer):
    compiler = StructureCompiler(lambda: tokenizer, [EOS])
    compiler.compile(STRUCTURE)
    return GrammarDrafter(compiler.prepare)


def test_what_the_structure_forces_is_guessed(drafter, tokenizer):
    item = sequence("a", [5, 6], max_tokens=99, structured_output=STRUCTURE)
    assert tokenizer.decode(list(drafter.propose(item, 9).token_ids)) == "{"
    item.token_ids += tokenizer.encode('{"', add_special_tokens=False)
    draft = drafter.propose(item, 9)
    assert tokenizer.decode(list(draft.token_ids)) == 'father_name"'
    assert list(draft.chances) == sorted(draft.chances, reverse=True)
    assert drafter.propose(item, 2).token_ids == draft.token_ids[:2]
    item.token_ids.append(draft.token_ids[0])
    assert drafter.propose(item, 9).token_ids == draft.token_ids[1:]


def test_other_tokens_of_the_same_text_make_it_less_sure(drafter, tokenizer):
    item = sequence("a", [5, 6], max_tokens=99, structured_output=STRUCTURE)
    item.token_ids += tokenizer.encode('{"', add_special_tokens=False)
    before = drafter.propose(item, 9)
    for letter in "father":
        item.token_ids += tokenizer.encode(letter, add_special_tokens=False)
        after = drafter.propose(item, 9)
    assert tokenizer.decode(list(after.token_ids)) == '_name"'
    assert after.chances[0] < before.chances[0]


def test_a_free_text_a_broken_and_an_ended_answer_have_no_guesses(drafter, tokenizer):
    assert drafter.propose(sequence("free", [5], max_tokens=9), 9).token_ids == ()
    broken = sequence("broken", [5], max_tokens=9, structured_output=STRUCTURE)
    broken.token_ids += tokenizer.encode("[", add_special_tokens=False)
    ended = sequence("ended", [5], max_tokens=99, structured_output=STRUCTURE)
    ended.token_ids += tokenizer.encode('{"father_name":"Abraham"}', add_special_tokens=False)
    for item in (broken, ended):
        assert drafter.propose(item, 9).token_ids == ()
        item.token_ids.append(EOS)
        assert drafter.propose(item, 9).token_ids == ()


def test_nothing_waits_for_a_structure_that_is_being_compiled():
    future, item = Future(), sequence("a", [5], max_tokens=9, structured_output=STRUCTURE)
    drafter = GrammarDrafter(lambda _: future)
    assert drafter.propose(item, 9).token_ids == ()
    future.set_exception(InvalidRequest("wrong", field="json_schema"))
    assert drafter.propose(item, 9).token_ids == ()

    def refuse(_):
        raise Overloaded("too many")

    assert GrammarDrafter(refuse).propose(item, 9).token_ids == ()
