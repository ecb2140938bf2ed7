"""Messages, tools and tool choices: what the template gets of them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from services.router.edge.answer.families import CALL_FORMATS, AnswerFormats
from services.router.edge.http.openai.chat import Chat, ParsedChat
from services.router.edge.text.prompt_tokenizer import ChatPrompt
from shared.errors import InvalidRequest
from shared.model.text.tokenizer import Tokenizer
from shared.structure.structured_output import StructureKind

PARAMETERS = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time"}}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def parse(tokenizer: Tokenizer, **fields: Any) -> ParsedChat:
    return Chat(tokenizer, "m").parse(json.dumps({"messages": [USER], **fields}).encode())


def prompt_of(call: ParsedChat) -> ChatPrompt:
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_calls_and_their_answers_reach_the_template(tokenizer: Tokenizer) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "assistant", "content": None, "refusal": "I will not", "reasoning_content": "hm"},
    ]
    _, call, answer, refusal = prompt_of(parse(tokenizer, messages=messages, tools=[WEATHER])).messages
    assert call == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert answer == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}
    assert refusal == {"role": "assistant", "content": "I will not", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "messages[1].content is missing"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id is missing"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text is missing"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[1].content[0].type 'image_url': images are not served here, text parts alone are",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio': audio is not served here"),
        ({"role": "user", "content": [{"type": "smell"}]}, "'smell': such a part is not served here"),
    ],
)
def test_a_message_that_cannot_be_served_is_refused_in_plain_words(
    tokenizer: Tokenizer, message: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(tokenizer, messages=[USER, message])
    assert caught.value.field == "messages"
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "wether"}}},
            "tool_choice",
            "names 'wether', which tools does not have: weather",
        ),
        ({"tools": [WEATHER], "tool_choice": "often"}, "tool_choice", "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "'weather' twice"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type 'web_search' is not served here"),
        ({"tools": [{"type": "custom"}]}, "tools", "tools[0].type 'custom' is not served here"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function is missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
    ],
)
def test_tools_that_cannot_be_served_are_refused_by_field(
    tokenizer: Tokenizer, fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(tokenizer, **fields)
    assert caught.value.field == field
    assert words in caught.value.message


def test_without_a_choice_the_model_decides_and_with_none_it_sees_no_tools(tokenizer: Tokenizer) -> None:
    call = parse(tokenizer, tools=[WEATHER, TIME])
    assert call.sampling.structured_output is None
    assert [tool["function"]["name"] for tool in prompt_of(call).tools] == ["weather", "time"]  # type: ignore[index,call-overload]
    assert call.tools is not None
    assert call.tools.max_calls is None
    assert parse(tokenizer, tools=[WEATHER], parallel_tool_calls=False).tools.max_calls == 1  # type: ignore[union-attr]
    none = parse(tokenizer, tools=[WEATHER], tool_choice="none")
    assert (none.tools, prompt_of(none).tools) == (None, [])


def test_a_named_tool_holds_the_answer_to_its_parameters(tokenizer: Tokenizer) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    structure = parse(tokenizer, tools=[TIME, WEATHER], tool_choice=choice).sampling.structured_output
    assert structure is not None
    assert structure.kind is StructureKind.JSON_SCHEMA
    assert json.loads(structure.text) == {
        **PARAMETERS,
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }


def test_required_tools_hold_the_answer_to_a_list_of_calls_whose_schemas_stay_apart(tokenizer: Tokenizer) -> None:
    structure = parse(
        tokenizer, tools=[TIME, WEATHER], tool_choice="required", parallel_tool_calls=False
    ).sampling.structured_output
    assert structure is not None
    schema = json.loads(structure.text)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    time, weather = schema["items"]["anyOf"]
    assert time["properties"]["name"] == {"const": "time"}
    assert weather["properties"]["parameters"] == {"$ref": "#/$defs/1"}
    assert schema["$defs"]["1"] == {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/1/$defs/city"}},
        "$defs": {"city": {"type": "string"}},
        "additionalProperties": False,
    }


def test_a_tools_references_are_within_its_own_schema_wherever_that_stands(tokenizer: Tokenizer) -> None:
    properties = {
        "name": {"type": "string"},
        "again": {"$ref": "#/properties/name"},
        "children": {"type": "array", "items": {"$ref": "#"}},
    }
    parameters = {"type": "object", "properties": properties, "required": ["name"]}
    tree = {"type": "function", "function": {"name": "tree", "parameters": parameters}}
    structure = parse(tokenizer, tools=[WEATHER, tree], tool_choice="required").sampling.structured_output
    assert structure is not None
    schema = json.loads(structure.text)
    whole = {"name": "a", "again": "b", "children": [{"name": "c", "children": []}]}
    jsonschema.validate([{"name": "tree", "parameters": whole}], schema)
    for wrong in ({"name": "a", "again": 5}, {"name": "a", "children": [{}]}, {"name": "a", "children": [[]]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{"name": "tree", "parameters": wrong}], schema)


@pytest.mark.parametrize("key", ["$defs", "definitions"])
@pytest.mark.parametrize("value", [5, [1], "x", True])
def test_definitions_that_are_none_do_not_break_a_list_of_calls(tokenizer: Tokenizer, key: str, value: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", key: value}}}
    assert parse(tokenizer, tools=[tool], tool_choice="required").sampling.structured_output is not None


@pytest.mark.parametrize("name", ["hermes", "openai"])
def test_forced_tools_that_are_too_large_together_are_refused_by_field(tokenizer: Tokenizer, name: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": "x" * 3000}}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(100)]
    chat = Chat(tokenizer, "m", AnswerFormats(CALL_FORMATS[name], None))
    with pytest.raises(InvalidRequest, match="the rules of all tools take more than 262144 bytes") as caught:
        chat.parse(json.dumps({"messages": [USER], "tools": tools, "tool_choice": "required"}).encode())
    assert caught.value.field == "tools"
