"""Every way to ask for structured output, and what is refused with its place."""

from __future__ import annotations

import json

import pytest

from services.router.edge.http.openai.completions import parse_completion
from services.router.edge.http.openai.schemas import CommonRequest, parse_chat
from services.router.edge.text.generation_defaults import NO_DEFAULTS
from shared.errors import InvalidRequest
from shared.structure.grammar_text import MANY_BLANKS
from shared.structure.short_numbers import any_object
from shared.structure.structured_output import StructuredOutput, StructureKind

POINT = {"type": "object", "properties": {"y": {"type": "integer"}, "x": {"type": "integer"}}}
CLOSED = {**POINT, "additionalProperties": False}
SCHEMA, TAGGED = StructureKind.JSON_SCHEMA, StructureKind.STRUCTURAL_TAG
TAG = {"structures": [{"begin": "<f=a>", "schema": POINT, "end": "</f>"}], "triggers": ["<f="]}
TAG_TEXT = json.dumps(TAG)


def requests(**fields: object) -> list[CommonRequest]:
    """The same fields at both endpoints."""
    return [
        parse_chat(json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()),
        parse_completion(json.dumps({"prompt": "a", **fields}).encode()),
    ]


@pytest.mark.parametrize(
    ("fields", "kind", "text", "source"),
    [
        ({"response_format": {"type": "json_object"}}, StructureKind.JSON_OBJECT, "", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": POINT}}},
            SCHEMA,
            POINT,
            "response_format.json_schema.schema",
        ),
        ({"regex": "a+"}, StructureKind.REGEX, "a+", "regex"),
        ({"ebnf": 'root ::= "a"'}, StructureKind.GRAMMAR, 'root ::= "a"', "ebnf"),
        ({"json_schema": json.dumps(POINT)}, SCHEMA, POINT, "json_schema"),
        ({"structural_tag": json.dumps(TAG)}, TAGGED, TAG_TEXT, "structural_tag"),
        ({"response_format": {"type": "structural_tag", **TAG}}, TAGGED, TAG_TEXT, "response_format"),
        ({"allowed_token_ids": [9, 5, 8, 7, 5]}, StructureKind.ALLOWED_TOKENS, "5,7-9", "allowed_token_ids"),
        ({"structured_outputs": {"json": POINT}}, SCHEMA, POINT, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(POINT)}}, SCHEMA, POINT, "structured_outputs.json"),
        (
            {"structured_outputs": {"json": POINT, "disable_any_whitespace": True}},
            SCHEMA,
            {**POINT, "x-guidance": {"whitespace_flexible": False}},
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json": {"anyOf": [POINT]}, "disable_additional_properties": True}},
            SCHEMA,
            {"anyOf": [CLOSED]},
            "structured_outputs.json",
        ),
        (
            {
                "structured_outputs": {
                    "json": {"properties": {"properties": POINT, "kind": {"enum": [{"properties": 1}]}}},
                    "disable_additional_properties": True,
                }
            },
            SCHEMA,
            {
                "properties": {"properties": CLOSED, "kind": {"enum": [{"properties": 1}]}},
                "additionalProperties": False,
            },
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            SCHEMA,
            {**any_object(), "x-guidance": {"whitespace_pattern": " ?"}},
            "structured_outputs.json_object",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"whitespace": "compact"}},
            SCHEMA,
            {**any_object(), "x-guidance": {"whitespace_flexible": False}},
            "response_format",
        ),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": {"schema": POINT}},
                "structured_outputs": {"whitespace": "any", "numbers": "any"},
            },
            SCHEMA,
            {**POINT, "x-guidance": {"whitespace_pattern": MANY_BLANKS, "any_numbers": True}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructureKind.REGEX, "a+", "structured_outputs.regex"),
        (
            {"structured_outputs": {"grammar": "start: /a/"}},
            StructureKind.GRAMMAR,
            "start: /a/",
            "structured_outputs.grammar",
        ),
        ({"guided_json": POINT}, SCHEMA, POINT, "guided_json"),
        (
            {"guided_json": POINT, "guided_whitespace_pattern": ""},
            SCHEMA,
            {**POINT, "x-guidance": {"whitespace_pattern": ""}},
            "guided_json",
        ),
        ({"guided_regex": "a|b"}, StructureKind.REGEX, "a|b", "guided_regex"),
        ({"guided_grammar": 'root ::= "a"'}, StructureKind.GRAMMAR, 'root ::= "a"', "guided_grammar"),
    ],
)
def test_each_field_gives_its_structure(fields: dict, kind: StructureKind, text: object, source: str) -> None:
    for request in requests(**fields):
        structure = request.sampling_params(None, None, NO_DEFAULTS).structured_output
        assert structure is not None
        assert (structure.kind, structure.source) == (kind, source)
        if kind is SCHEMA:
            assert json.loads(structure.text) == text
            assert structure.text.find('"y"') <= structure.text.find('"x"')  # answers have the order of the schema
        else:
            assert structure.text == text


@pytest.mark.parametrize(
    "fields", [{"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}]
)
def test_choices(fields: dict) -> None:
    for request in requests(**fields):
        expected = StructuredOutput(StructureKind.CHOICE, choices=("yes", "no"))
        assert request.sampling_params(None, None, NO_DEFAULTS).structured_output == expected


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None, "structured_outputs": None}]
)
def test_free_text(fields: dict) -> None:
    for request in requests(**fields):
        assert request.sampling_params(None, None, NO_DEFAULTS).structured_output is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format"),
        ({"structural_tag": {**TAG, "triggers": []}}, "structural_tag"),
        ({"structural_tag": {**TAG, "structures": [{"begin": ""}]}}, "structural_tag"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": "json_object"}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace": "any"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "whitespace": "two"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [4, -1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [4], "guided_regex": "a"}, "allowed_token_ids"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"guided_grammar": "a" * 300_000}, "guided_grammar"),
        ({"structural_tag": "{}"}, "structural_tag"),
    ],
)
def test_a_wrong_structure_is_refused_with_its_field(fields: dict, field: str) -> None:
    for parse, prompt in (
        (parse_chat, {"messages": [{"role": "user", "content": "a"}]}),
        (parse_completion, {"prompt": "a"}),
    ):
        with pytest.raises(InvalidRequest) as refused:
            parse(json.dumps({**prompt, **fields}).encode()).sampling_params(None, None, NO_DEFAULTS)
        assert refused.value.field == field
