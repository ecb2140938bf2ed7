"""Schemas as Python's literals: what fits is an instance once it is read, and what does not is not written."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from services.router.edge.answer.events import CallArguments
from services.router.edge.answer.families import CALL_FORMATS
from services.router.edge.answer.python_rules import PythonRules, UnsupportedSchemaError
from services.router.edge.answer.reader import AnswerReader
from services.router.edge.answer.tool_use import ToolUse
from shared.model.text.tokenizer import Tokenizer

Schema = dict[str, Any]


def closed(properties: Schema, required: list[str] | None = None, **more: object) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties] if required is None else required,
        "additionalProperties": False,
        **more,
    }


TREE = {"node": closed({"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})}
CASES: list[tuple[Schema, list[str], list[str]]] = [
    (
        closed({"city": {"type": "string"}}),
        ['city="Rome"', "city='Rome'", r"city='it\'s'", r'city="a\n\"b"'],
        ["", "city=5", "city=Rome", 'town="Rome"', 'city="Rome",city="Oslo"', "city='a'b'"],
    ),
    (
        closed({"on": {"type": "boolean"}, "note": {"type": ["string", "null"]}, "n": {"type": "integer"}}, ["on"]),
        ["on=True", "on=False, note=None", 'on=True,note="x",n=5', "on=True, n=-5"],
        ["on=true", "note=None", "n=5, on=True", "on=True, n=5.5", "on=True,"],
    ),
    (
        closed({"a": {"type": "integer"}, "b": {"type": "integer"}}, []),
        ["", "a=1", "b=2", "a=1, b=2"],
        [", b=2", "b=2, a=1", "a=1,, b=2"],
    ),
    (
        closed({"kind": {"enum": ["boat", "it's", 3, None, True]}}),
        ["kind='boat'", 'kind="boat"', 'kind="it\'s"', "kind=3", "kind=None", "kind=True"],
        ["kind='tower'", "kind=null", "kind=4"],
    ),
    (
        closed({"days": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}}),
        ["days=[True]", "days=[True, False]"],
        ["days=[]", "days=[True,False,True]", "days=[1]"],
    ),
    (
        closed({"at": closed({"x": {"type": "number"}, "in": {"type": "string"}}, ["x"])}),
        ['at={"x": 1.5}', "at={'x': 1, 'in': 'm'}"],
        ["at={}", 'at={"x": 1, "y": 2}', 'at={"in": "m"}'],
    ),
    (
        closed({"size": {"type": "object", "additionalProperties": {"type": "integer"}}}),
        ["size={}", 'size={"a": 1, "b": 2}'],
        ['size={"a": "b"}', 'size={"a": 1 "b": 2}'],
    ),
    (
        closed({"list": {"$ref": "#/$defs/node"}}, **{"$defs": TREE}),
        ['list={"value": 1, "next": None}', 'list={"value": 1, "next": {"value": 2, "next": None}}'],
        ['list={"value": 1}', "list=None"],
    ),
    ({"type": "object"}, ["", "a=1", "from='x', b=[{'y': None}]"], ["1", "a=", "a=null"]),
    (closed({"any": {}}), ["any=None", "any={'a': [1, 'b', True]}", "any=-1.5e3"], ["any=", "any=nul"]),
    (
        closed(
            {"word": {"type": "string", "minLength": 2, "maxLength": 3}, "at": {"type": "string", "format": "date"}}
        ),
        ["word='ab', at=\"2026-11-22\"", 'word="abc", at="2026-11-22"'],
        ["word='a', at=\"2026-11-22\"", "word='abcd', at=\"2026-11-22\"", 'word="ab", at="today"'],
    ),
]


def matcher(schema: Schema, vocabulary: LLTokenizer) -> LLMatcher:
    rules = PythonRules("f", schema)
    arguments = rules.arguments()
    made = LLMatcher(vocabulary, f'start: "[f(" {arguments} ")]"\n{rules.text}', log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def read(text: str) -> object:
    """The arguments of `[f(…)]`, as a client gets them."""
    reader = AnswerReader(ToolUse(frozenset({"f"})), CALL_FORMATS["pythonic"], None, is_open=False)
    events = reader.push(text) + reader.flush()
    return json.loads("".join(event.text for event in events if isinstance(event, CallArguments)))


@pytest.mark.parametrize(("schema", "fitting", "others"), CASES)
def test_arguments_that_fit_are_instances_of_the_schema(
    schema: Schema, fitting: list[str], others: list[str], tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    made = matcher(schema, vocabulary)

    def fits(arguments: str) -> bool:
        token_ids, copy = tokenizer.encode(f"[f({arguments})]", add_special_tokens=False), made.deep_copy()
        return copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()

    assert [text for text in fitting if not fits(text)] == []
    assert [text for text in others if fits(text)] == []
    for text in fitting:
        jsonschema.validate(read(f"[f({text})]"), schema)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_model_writes_under_the_rules_is_read_as_an_instance(
    seed: int, tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    """A model that draws any allowed token, after some of them one that ends something, where it may."""
    draw, num_ended = random.Random(seed), 0
    marks = {i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) in ("'", '"', "]", ")", "}")}
    for schema, _, _ in CASES:
        made, token_ids = matcher(schema, vocabulary), []
        while not made.is_accepting() and len(token_ids) < 150:
            mask = int.from_bytes(made.compute_bitmask(), "little")
            allowed = [i for i in range(tokenizer.vocab_size) if mask >> i & 1]
            ending = [i for i in allowed if i in marks]
            token_ids.append(draw.choice(ending if ending and len(token_ids) > 20 else allowed))
            assert made.consume_token(token_ids[-1])
        if made.is_accepting():
            num_ended += 1
            jsonschema.validate(read(tokenizer.decode(token_ids)), schema)
    assert num_ended > len(CASES) // 2


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (closed({"a-b": {}, "c d": {}}), 'property "c d"'),
        (closed({"a": {"type": "array", "uniqueItems": True}}), "uniqueItems"),
        (closed({"a": {"oneOf": [{"type": "null"}]}}), "oneOf"),
        (closed({"a": {"not": {}}}), "not"),
        (closed({"a": {"$ref": "https://x.org/a"}}), r"\$ref"),
        (closed({"a": {"enum": [1], "type": "string"}}), "enum"),
        (closed({"a": {"type": "text"}}), 'type "text"'),
    ],
)
def test_what_the_rules_cannot_say_is_named(schema: Schema, reason: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=reason):
        PythonRules("f", schema).arguments()
