"""Arguments between tags: which are text follows from the schema, and what a grammar allows is read as an instance."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from services.router.edge.answer import tagged_values
from services.router.edge.answer.call_rules import CallRules
from services.router.edge.answer.events import CallArguments
from services.router.edge.answer.families import CALL_FORMATS
from services.router.edge.answer.python_rules import UnsupportedSchemaError
from services.router.edge.answer.reader import AnswerReader
from services.router.edge.answer.tool_use import ToolUse
from shared.model.text.tokenizer import Tokenizer
from tests.demo import DEMO

Schema = dict[str, Any]
BLANKS = "BLANKS: /[ \\n\\r\\t]{1,16}/\n"
FORMATS = ["qwen3_coder", "glm45"]


def closed(properties: Schema, required: list[str] | None = None, **more: object) -> Schema:
    names = [*properties] if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


def written(name: str, arguments: dict[str, str]) -> str:
    if name == "qwen3_coder":
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>f\n{inner}</tool_call>"


def pieces(name: str, text: str, schema: Any) -> list[str]:
    use = ToolUse(frozenset({"f"}), schemas={"f": schema})
    reader = AnswerReader(use, CALL_FORMATS[name], None, is_open=False)
    events = [event for character in text for event in reader.push(character)] + reader.flush()
    return [event.text for event in events if isinstance(event, CallArguments)]


def read(name: str, text: str, schema: Any) -> Any:
    return json.loads("".join(pieces(name, text, schema)))


LARGE = {"n": {"type": "integer"}, **{f"n{i}": {"title": "x" * 1000} for i in range(10)}}
TEXT = {"type": "string"}


def nested(keyword: str, depth: int) -> Any:
    """A text, by a schema in which the keyword stands in itself."""
    schema: Any = TEXT
    for _ in range(depth):
        schema = {keyword: [schema]}
    return schema


VALUES: list[tuple[Any, str, object]] = [
    (TEXT, "Rome", "Rome"),
    (TEXT, "", ""),
    (TEXT, "5", "5"),
    (TEXT, '{"a": 1}', '{"a": 1}'),
    (TEXT, '  two\n\n"lines"\\n\t', '  two\n\n"lines"\\n\t'),
    (TEXT, "</parameter <arg_val", "</parameter <arg_val"),
    ({"enum": ["a", "b"]}, "a", "a"),
    ({"$ref": "#/$defs/word"}, "7", "7"),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, " 5.0\n", 5.0),
    ({"type": "integer"}, "five", "five"),
    ({"type": "number"}, "-1.5e3", -1500),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "True", True),
    ({"type": "array"}, "[1, 'a', None]", [1, "a", None]),
    ({"type": "array"}, '["\\ud83d\\ude00"]', ["\U0001f600"]),
    ({"type": "object"}, '{"a": [true]}', {"a": [True]}),
    ({"type": "object"}, "{" * 5000, "{" * 5000),
    ({"anyOf": [TEXT, {"type": "null"}]}, "null", None),
    ({"anyOf": [TEXT, {"type": "null"}]}, "5", "5"),
    ({"type": ["string", "integer"]}, "5", 5),
    ({}, "5", 5),
    ({}, "five", "five"),
    ({}, '"five"', '"five"'),
    (None, "five", "five"),
    ({"$ref": "#/properties/a"}, "x", "x"),
    ({"type": 5, "enum": "a", "anyOf": 3}, "x", "x"),
    ({"type": [{}], "allOf": [5]}, "x", "x"),
    *((nested(keyword, 3), "5", "5") for keyword in ("anyOf", "oneOf", "allOf")),
    *((nested(keyword, 20), "5", 5) for keyword in ("anyOf", "oneOf", "allOf")),  # deeper than schemas are followed
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("schema", "value", "expected"), VALUES)
def test_a_value_is_what_its_schema_asks_for(name: str, schema: Any, value: str, expected: object) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "$defs": {"word": TEXT}}
    assert read(name, written(name, {"a": value, "b": "1"}), whole) == {"a": expected, "b": 1}


@pytest.mark.parametrize("name", FORMATS)
def test_texts_are_streamed_and_what_is_cut_off_stays_so(name: str) -> None:
    text = written(name, {"a": 'a long "text"'})
    parts = pieces(name, text, closed({"a": TEXT}))
    assert len(parts) > 10
    cut = "".join(pieces(name, text[: text.index(' "text"')], closed({"a": TEXT})))
    assert cut == '{"a": "a long'


@pytest.mark.parametrize("name", FORMATS)
@given(st.dictionaries(st.sampled_from("abc"), st.text().filter(lambda text: "<" not in text and "\r" not in text)))
def test_any_texts_come_back(name: str, arguments: dict[str, str]) -> None:
    schema = {"type": "object", "additionalProperties": TEXT}
    assert read(name, written(name, arguments), schema) == arguments


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("schema", [{"properties": 3}, {"$ref": "#"}, {"properties": {"a": {"$ref": 4}}}])
def test_a_schema_that_is_none_allows_anything(name: str, schema: Any) -> None:
    assert read(name, written(name, {"a": "x"}), schema) == {"a": "x"}


MANY = {"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(12)]}
LEADS_BACK = {"type": "object", "properties": {"a": MANY}, "$defs": {str(i): MANY for i in range(12)}}


@pytest.mark.parametrize("name", FORMATS)
def test_references_that_lead_back_are_followed_once(name: str, vocabulary: LLTokenizer) -> None:
    assert read(name, written(name, {"a": "x"}), LEADS_BACK) == {"a": "x"}
    assert matcher(name, LEADS_BACK, vocabulary) is not None


CASES: list[tuple[Schema, list[dict[str, str]], list[dict[str, str]]]] = [
    (closed({"a": TEXT}), [{"a": "x"}, {"a": ""}, {"a": 'two\n"lines"'}], [{}, {"b": "x"}, {"a": "x", "b": "y"}]),
    (
        closed({"a": {"type": "integer"}, "b": {"type": "boolean"}}, ["a"]),
        [{"a": "5"}, {"a": "-5", "b": "true"}],
        [{"a": "5.5"}, {"a": "x"}, {"b": "true"}, {"b": "true", "a": "5"}, {"a": "5", "b": "True"}],
    ),
    (closed({"a": {"enum": ["one", "two", 3]}}), [{"a": "one"}, {"a": "3"}], [{"a": "four"}, {"a": '"one"'}]),
    (
        closed({"a": closed({"x": {"$ref": "#/$defs/n"}})}, **{"$defs": {"n": {"type": "number"}}}),
        [{"a": '{"x":1.5}'}],
        [{"a": "{}"}, {"a": '{"x":"y"}'}],
    ),
    (closed({"a": {"anyOf": [TEXT, {"type": "null"}]}}), [{"a": "null"}, {"a": "x"}], [{}]),
    ({"type": "object"}, [{}, {"a": "x", "b_2": "5"}], [{"2": "x"}]),
    (
        closed({"a": TEXT, "b": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}, ["a"]),
        [{"a": "x"}, {"a": "x", "b": '[{"a":"y","b":[]}]'}],
        [{"a": "x", "b": "[[]]"}, {"a": "x", "b": "[{}]"}],
    ),
]


def matcher(name: str, schema: Schema, vocabulary: LLTokenizer) -> LLMatcher:
    rules = CallRules(json.dumps, lambda _: "", json.dumps, {"f": schema}, many=False)
    made = LLMatcher(vocabulary, f"start: calls\n{CALL_FORMATS[name].grammar(rules)}{BLANKS}", log_level=0)
    assert not made.is_error(), made.get_error()
    return made


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("schema", "fitting", "others"), CASES)
def test_arguments_that_fit_are_instances_of_the_schema(
    name: str,
    schema: Schema,
    fitting: list[dict[str, str]],
    others: list[dict[str, str]],
    tokenizer: Tokenizer,
    vocabulary: LLTokenizer,
) -> None:
    made = matcher(name, schema, vocabulary)

    def fits(arguments: dict[str, str]) -> bool:
        token_ids = tokenizer.encode(written(name, arguments), add_special_tokens=False)
        copy = made.deep_copy()
        return copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()

    assert [arguments for arguments in fitting if not fits(arguments)] == []
    assert [arguments for arguments in others if fits(arguments)] == []
    for arguments in fitting:
        jsonschema.validate(read(name, written(name, arguments), schema), schema)


@pytest.mark.parametrize("special", [True, False])
def test_tags_may_be_tokens(special: bool, tmp_path: Path) -> None:
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    tags = [AddedToken(tag, special=special, normalized=False) for tag in CALL_FORMATS["glm45"].special]
    backend.add_tokens(tags)
    ids = {tag.content: backend.token_to_id(tag.content) for tag in tags}
    vocabulary = LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=[0])
    rules = CallRules(lambda tag: f"<[{ids[tag]}]>", lambda _: "", json.dumps, {"f": closed({"a": TEXT})}, many=False)
    made = LLMatcher(vocabulary, f"start: calls\n{CALL_FORMATS['glm45'].grammar(rules)}{BLANKS}", log_level=0)
    for value, is_whole in (("x </ <y>\n", True), ("</arg_value>x", False)):
        token_ids, copy = backend.encode(written("glm45", {"a": value}), add_special_tokens=False).ids, made.deep_copy()
        assert (copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()) == is_whole


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_model_writes_under_the_rules_is_read_as_an_instance(
    name: str, seed: int, tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    """A model that draws any allowed token, after some of them one that may begin a closing tag, where it may."""
    draw, num_ended = random.Random(seed), 0
    texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    tags = ("</parameter>", "</function>", "</arg_value>")
    begun = tuple(tag[:end] for tag in tags for end in range(1, len(tag) + 1))
    for schema, _, _ in CASES:
        made, token_ids = matcher(name, schema, vocabulary), []
        while not made.is_accepting() and len(token_ids) < 250:
            mask = int.from_bytes(made.compute_bitmask(), "little")
            allowed = [i for i in range(tokenizer.vocab_size) if mask >> i & 1]
            tail = tokenizer.decode(token_ids[-12:])
            ending = [i for i in allowed if texts[i] and (tail + texts[i]).endswith(begun)]
            token_ids.append(draw.choice(ending if ending and len(token_ids) > 30 else allowed))
            assert made.consume_token(token_ids[-1])
        if made.is_accepting():
            num_ended += 1
            jsonschema.validate(read(name, tokenizer.decode(token_ids), schema), schema)
    assert num_ended > len(CASES) // 2


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (closed({"a": {"type": "string", "pattern": "[a-z]"}}), "pattern"),
        (closed({"a": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}}), "items"),
        (closed({"a": {"anyOf": [{"enum": ["x"]}, {"type": "string", "minLength": 2}]}}), "enum"),
        (closed({"a>b": TEXT}), 'property "a>b"'),
        (closed({}, ["a"]), 'required "a"'),
        (closed({f"a{i}": {"$ref": "#/$defs/n"} for i in range(40)}, **{"$defs": LARGE}), "arguments whose rules"),
        ({"type": "object", "required": [{}]}, "what is no schema"),
        ({"type": "object", "properties": 5}, "what is no schema"),
        ({"type": "object", "properties": "x"}, "what is no schema"),
    ],
)
def test_what_rules_cannot_say_is_refused_by_name(name: str, schema: Schema, reason: str) -> None:
    rules = CallRules(json.dumps, lambda _: "", json.dumps, {"f": schema}, many=False)
    with pytest.raises(UnsupportedSchemaError, match=f'tool "f": {reason}'):
        CALL_FORMATS[name].grammar(rules)


def test_many_large_tools_are_refused_before_the_rules_of_all_are_made() -> None:
    seen: list[Schema] = []

    def counted(schema: Schema) -> str:
        seen.append(schema)
        return json.dumps(schema)

    large = closed({f"n{i}": {"type": "integer", "title": "x" * 1000} for i in range(30)})
    rules = CallRules(json.dumps, lambda _: "", counted, {f"f{i}": large for i in range(512)}, many=False)
    for make in (
        lambda: rules.by_tool("named", lambda name, arguments: f"{name} {arguments}"),
        lambda: CALL_FORMATS["glm45"].grammar(rules),
    ):
        with pytest.raises(UnsupportedSchemaError, match="the rules of all tools take more than 262144 bytes"):
            make()
    assert 0 < len(seen) < 20


def test_what_arguments_share_is_not_looked_through_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    follow, num_followed = tagged_values._target, 0

    def counted(*given: Any) -> Any:
        nonlocal num_followed
        num_followed += 1
        return follow(*given)

    monkeypatch.setattr(tagged_values, "_target", counted)
    many = {"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(200)]}
    definitions = {"many": many, **{str(i): TEXT for i in range(200)}}
    schema = closed({f"a{i}": {"$ref": "#/$defs/many"} for i in range(200)}, **{"$defs": definitions})
    rules = CallRules(json.dumps, lambda _: "", json.dumps, {"f": schema}, many=False)
    assert CALL_FORMATS["glm45"].grammar(rules)
    assert num_followed < 1000  # each argument's own reference and each alternative once
