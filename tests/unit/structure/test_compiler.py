"""What compiles, what each structure allows, and what a refusal says."""

from __future__ import annotations

import json

import pytest
import tokenizers

from shared.errors import InvalidRequest, Overloaded
from shared.model.text.tokenizer import Tokenizer
from shared.structure import compiler as compiler_module
from shared.structure.compiler import StructureCompiler
from shared.structure.grammar_text import MANY_BLANKS
from shared.structure.structured_output import ReasoningPart, StructuredOutput, StructureKind
from tests.waiting import DEADLINE_S

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": ["integer", "null"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": POINT, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "string"}, "end": ""},
        {"begin": "<|user|>?", "schema": {"type": "boolean"}},  # the first part is one token of the vocabulary
    ],
    "triggers": ["<f=", "<|user|>"],
}


def schema(value: object) -> StructuredOutput:
    return StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(value))


def accepts(compiler: StructureCompiler, tokenizer: Tokenizer, structure: StructuredOutput, text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher = compiler.compile(structure).deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


THINK = ("<think>", "</think>")


def thinking(tokenizer: Tokenizer) -> Tokenizer:
    """The vocabulary with the marks as tokens of their own."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.add_tokens([tokenizers.AddedToken(mark) for mark in THINK])
    return Tokenizer(backend, {})


@pytest.mark.parametrize("has_marks", [False, True], ids=["marks in characters", "marks are tokens"])
@pytest.mark.parametrize(
    ("is_open", "good", "bad"),
    [
        (False, ["a.b", "<think>um {\n</think>\n\na.b", "<think></think>a.b"], ["um</think>a.b", "<think>um", "a.b "]),
        (True, ["um </think>a.b", "</think>\na.b"], ["a.b", "um</think>x", "um</think>a.b."]),
    ],
)
@pytest.mark.parametrize(
    ("kind", "text", "choices"),
    [
        (StructureKind.CHOICE, "", ("a.b", "c")),
        (StructureKind.REGEX, r"[a-z]\.b", ()),
        (StructureKind.GRAMMAR, 'start: "a." part\npart: "b" | "x"', ()),
    ],
)
def test_a_structure_begins_behind_reasoning(
    tokenizer, eos_token_ids, has_marks, is_open, good, bad, kind, text, choices
):
    vocabulary = thinking(tokenizer) if has_marks else tokenizer
    compiler = StructureCompiler(lambda: vocabulary, eos_token_ids)
    structure = StructuredOutput(kind, text, choices, reasoning=ReasoningPart(*THINK, is_open=is_open))
    for answer in good:
        assert accepts(compiler, vocabulary, structure, answer), answer
    for answer in bad:
        assert not accepts(compiler, vocabulary, structure, answer), answer


def test_reasoning_does_not_end_the_answer(tokenizer, eos_token_ids):
    vocabulary = thinking(tokenizer)
    compiler = StructureCompiler(lambda: vocabulary, eos_token_ids)
    structure = StructuredOutput(StructureKind.JSON_OBJECT, reasoning=ReasoningPart(*THINK, is_open=True))
    matcher = compiler.compile(structure).deep_copy()
    end = vocabulary.encode("</think>", add_special_tokens=False)[0]
    for token in vocabulary.encode("So: {}", add_special_tokens=False):
        assert matcher.consume_token(token)
        mask = matcher.compute_bitmask()
        assert [mask[t // 8] >> t % 8 & 1 for t in (*eos_token_ids, end)] == [*(0 for _ in eos_token_ids), 1]


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (
            StructuredOutput(StructureKind.STRUCTURAL_TAG, json.dumps(TAGS)),
            ["free <g text", '<f=a>{"x":1,"y":2}</f> and <f=b>"c"', "<|user|>?true", "{ </f>"],
            ["<f=c>", '<f=a>{"y":1}</f>', '<f=a>{"x":1,"y":2}</g>', '<f=a>{"x":1,"y":2}', "<|user|>true"],
        ),
        (
            StructuredOutput(StructureKind.JSON_OBJECT),
            ["{}", '{"a": [1, {"b": null}]}', '{\n"a":\t"ü"\n}', '{"a":-12.5,"b":[[{"c":true}]]}'],
            ["[]", "1", "{", '{"a": 1} ', '{\n  "a": 1}', '{"a":[' + 21 * "1" + "]}"],
        ),
        (
            schema(POINT),
            ['{"x":1,"y":null}', '{"x": -3, "y": 4}', '{\n"x":\t1,\r"y": 2\n}', '{ "x" : 1 , "y" : 2 }'],
            ['{"x": 1}', '{"y": 1, "x": 1}', '{"x": 1, "y": 2, "z": 3}', '{"x": 1.5, "y": 1}', '{"x":  1,"y":2}'],
        ),
        (
            schema({**POINT, "x-guidance": {"whitespace_pattern": MANY_BLANKS}}),
            ['{"x":1,"y":2}', '{\n\n  "x":' + 64 * " " + '1,"y":2}'],
            ['{"x":' + 65 * " " + '1,"y":2}'],
        ),
        (
            schema(POINT),
            ['{"x":' + 18 * "9" + ',"y":-' + 18 * "9" + "}", '{"x":0,"y":1' + 18 * "0" + "}"],
            ['{"x":' + 20 * "1" + ',"y":1}', '{"x":1,"y":-' + 20 * "1" + "}"],
        ),
        (
            schema({**POINT, "x-guidance": {"any_numbers": True}}),
            ['{"x":' + 40 * "1" + ',"y":1}'],
            ['{"x":1.5,"y":1}'],
        ),
        (schema({"type": "integer", "minimum": 7}), ["7", 18 * "9"], ["6", "-7", 20 * "1"]),
        (schema({"type": "integer", "exclusiveMaximum": 7}), ["6", "-" + 18 * "9"], ["7", "-" + 20 * "1"]),
        (
            schema({"type": ["number", "null"]}),
            ["null", "0", "-12.25", 18 * "9", 9 * "1" + "." + 9 * "2"],
            ['"1"', 20 * "1", "0." + 10 * "3", 10 * "1" + ".5"],
        ),
        (schema({"type": "number", "minimum": 0, "maximum": 1}), ["0.5", "0." + 30 * "3"], ["-1", "2"]),
        (
            schema({"properties": {"type": {"const": {"type": "integer"}}}, "type": "object", "required": ["type"]}),
            ['{"type":{"type":"integer"}}'],
            ['{"type":1}', '{"type":{"type":"integer","minimum":0}}'],
        ),
        (
            schema({**POINT, "x-guidance": {"whitespace_flexible": False}}),
            ['{"x":1,"y":2}'],
            ['{"x": 1,"y":2}', ' {"x":1,"y":2}'],
        ),
        (schema({**POINT, "additionalProperties": True}), ['{"x": 1, "y": 2, "z": 3}'], ['{"x": 1, "z": 3}']),
        (StructuredOutput(StructureKind.JSON_SCHEMA, "true"), ["1", '"a"', "[null]"], ["a", ""]),
        (
            StructuredOutput(StructureKind.REGEX, r"(\d{3}-)?\d{4} °[CF]"),
            ["1234 °C", "555-1234 °F"],
            ["x1234 °C", "1234 °Cx", "1234"],
        ),
        (
            StructuredOutput(
                StructureKind.CHOICE, choices=("yes", "yes, but", "a.c", 'new\nline "q" \\', "(ü|日本)*/")
            ),
            ["yes", "yes, but", "a.c", 'new\nline "q" \\', "(ü|日本)*/"],
            ["no", "abc", "ye", "ü", "yes,"],
        ),
        (
            StructuredOutput(
                StructureKind.GRAMMAR, 'start: greeting " " NAME\ngreeting: "Hi" | "Bye"\nNAME: /[A-Z][a-z]+/'
            ),
            ["Hi Bob", "Bye Eve"],
            ["Hi bob", "Hello Bob"],
        ),
        (
            StructuredOutput(StructureKind.GRAMMAR, 'root ::= "yes" | "no" rest\nrest ::= "!" rest | "."'),
            ["yes", "no!!."],
            ["no", "yes."],
        ),
    ],
)
def test_whole_answers_are_those_of_the_structure(compiler, tokenizer, structure, good, bad):
    assert [text for text in good if not accepts(compiler, tokenizer, structure, text)] == []
    assert [text for text in bad if accepts(compiler, tokenizer, structure, text)] == []


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (schema({"type": "object", "not": {}}), "not"),
        (schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "uniqueItems"),
        (schema({"type": "objekt"}), "objekt"),
        (schema({"type": "string", "format": "no-such"}), "no-such"),
        (schema({"$ref": "https://example.com/schema.json"}), "example.com"),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "nothing satisfies it"),
        (schema([]), "a schema is a JSON object"),
        (StructuredOutput(StructureKind.JSON_SCHEMA, "{"), "Expecting property name"),
        (StructuredOutput(StructureKind.JSON_SCHEMA, "[" * 60_000), "nested too deeply"),
        (StructuredOutput(StructureKind.JSON_SCHEMA, '{"const": "\\ud800"}'), "ud800"),
        (StructuredOutput(StructureKind.REGEX, "(a|b"), "unclosed group"),
        (StructuredOutput(StructureKind.REGEX, "(?=a)b"), "look-around"),
        (StructuredOutput(StructureKind.REGEX, "\ud800"), "surrogate"),
        (StructuredOutput(StructureKind.GRAMMAR, "start: missing"), "missing"),
        (
            StructuredOutput(StructureKind.STRUCTURAL_TAG, '{"structures": [1], "triggers": ["a"]}'),
            "begin, schema and end",
        ),
        (
            StructuredOutput(StructureKind.STRUCTURAL_TAG, json.dumps({**TAGS, "triggers": ["<f=b"]})),
            "no trigger begins",
        ),
        (StructuredOutput(StructureKind.ALLOWED_TOKENS, "5-999999"), "too large"),
        (StructuredOutput(StructureKind.ALLOWED_TOKENS, "9-5"), "invalid token range"),
        *(
            (StructuredOutput(StructureKind.GRAMMAR, text, reasoning=reasoning), "begins with a rule")
            for text in (" {}", '{"grammars": [{"json_schema": {}}]}', '{"grammars": 1}')
            for reasoning in (None, ReasoningPart(*THINK, is_open=True))
        ),
        (StructuredOutput(StructureKind.GRAMMAR, "root ::= missing"), "missing"),
        (StructuredOutput(StructureKind.GRAMMAR, 'root ::= "open'), "end of input"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(compiler, structure, reason):
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequest) as refused:
            compiler.compile(structure)
        assert refused.value.field == structure.kind.value
        assert reason in refused.value.message
        assert len(refused.value.message) < 700


@pytest.mark.parametrize(
    "text",
    [
        "(((((a{1,90}){1,90}){1,90}){1,90}){1,90})",
        "(.*a){300}[^b]{2000}",
        "|".join(f".{{{n}}}x{n}" for n in range(900)),
    ],
)
def test_an_expression_that_explodes_ends_within_its_limits(compiler, text):
    """Refused, or followed: either way soon. The limits are of work, not of time: no busy machine is their cause."""
    future = compiler.prepare(StructuredOutput(StructureKind.REGEX, text))
    refusal = future.exception(timeout=DEADLINE_S)
    if refusal is None:
        assert future.result().deep_copy().compute_bitmask()
    else:
        assert isinstance(refusal, InvalidRequest)


def test_each_structure_is_compiled_once(compiler):
    first = compiler.prepare(schema({"const": 1}))
    assert compiler.prepare(StructuredOutput(StructureKind.JSON_SCHEMA, '{"const": 1}', source="guided_json")) is first


def test_only_the_last_ones_are_kept(tokenizer, eos_token_ids, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_COMPILED", 2)
    compiler = StructureCompiler(lambda: tokenizer, eos_token_ids)
    first, second, third = (schema({"const": n}) for n in range(3))
    kept = [compiler.prepare(each) for each in (first, second)]
    assert compiler.prepare(first) is kept[0]
    compiler.prepare(third)
    assert compiler.prepare(first) is kept[0]
    assert compiler.prepare(second) is not kept[1]


def test_an_answer_that_was_taken_on_is_not_refused_for_those_that_wait(tokenizer, eos_token_ids, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_PENDING", 0)
    compiler = StructureCompiler(lambda: tokenizer, eos_token_ids)
    with pytest.raises(Overloaded):
        compiler.prepare(schema({}))
    assert compiler.compile(schema({})).deep_copy().compute_bitmask()


def test_a_model_without_an_end_token_is_refused(tokenizer):
    with pytest.raises(InvalidRequest, match="no end token"):
        StructureCompiler(lambda: tokenizer, ()).compile(schema({}))
