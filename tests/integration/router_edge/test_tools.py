"""Tools and reasoning over HTTP: chat completions, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from shared.model.text.chat_template import ChatTemplate
from shared.structure.compiler import StructureCompiler
from shared.structure.structured_output import ReasoningPart
from tests.integration.router_edge.conftest import Edge, StartEdge

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
CALLS = (
    'Let me see.\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
)
THOUGHT = "<think>\nhm\n</think>\n\nYes."


@pytest.fixture
async def edge(start_edge: StartEdge) -> Edge:
    edge = await start_edge(reasoning_parser="think")
    edge.core.limit = 2000
    return edge


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_calls_stand_in_the_message_with_ids_of_their_own(edge: Edge) -> None:
    edge.stops_with(CALLS)
    choice = (await edge.client.post(CHAT, json=ASK)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Rome"}'},
        {"name": "weather", "arguments": '{"city": "Oslo"}'},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    (prompt,) = [edge.tokenizer.decode(r.prompt_token_ids) for r in edge.core.requests]
    assert '{"name": "weather"' in prompt  # the template has no tools: they stand in a system message
    assert prompt.index("<system>") < prompt.index("<user>hi")


async def test_arguments_are_streamed_as_they_come(edge: Edge) -> None:
    edge.stops_with(CALLS)
    events = chunks(await edge.client.post(CHAT, json={**ASK, "stream": True, "parallel_tool_calls": False}))
    deltas = [event["choices"][0]["delta"] for event in events]
    parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert parts[0]["function"] == {"name": "weather", "arguments": ""}
    assert parts[0]["id"].startswith("call_")
    assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Rome"}'  # the second call is dropped
    assert len(parts) > 4
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_reasoning_is_apart_from_the_answer(edge: Edge) -> None:
    edge.stops_with(THOUGHT)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    message = (await edge.client.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    events = chunks(await edge.client.post(CHAT, json={**body, "stream": True}))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    quiet = (await edge.client.post(CHAT, json={**body, "include_reasoning": False})).json()["choices"][0]["message"]
    assert "reasoning_content" not in quiet


async def test_a_forced_call_is_what_the_grammar_lets_the_model_write(edge: Edge) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    edge.stops_with('{"city": "Rome"}')
    answer = await edge.client.post(CHAT, json={**ASK, "tool_choice": choice})
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    structure = edge.core.requests[0].sampling.structured_output
    assert structure is not None
    assert json.loads(structure.text)["type"] == "object"
    edge.stops_with('[{"name": "weather", "parameters": {}}]')
    required = (await edge.client.post(CHAT, json={**ASK, "tool_choice": "required"})).json()["choices"][0]
    assert required["finish_reason"] == "tool_calls"
    assert required["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}


async def test_a_forced_call_may_follow_reasoning(edge: Edge) -> None:
    edge.stops_with('<think>Rome!</think>\n[{"name": "weather", "parameters": {"city": "Rome"}}]')
    body = {**ASK, "tool_choice": "required"}
    message = (await edge.client.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Rome!"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("hi", ReasoningPart("<think>", "</think>", is_open=False)),
        ("hi<think>", ReasoningPart("<think>", "</think>", is_open=True)),
        ("hi<think>\n\n</think>", None),
    ],
    ids=["the model may begin", "the template began", "the template closed"],
)
async def test_a_structure_begins_where_reasoning_ends(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, end: str, expected: ReasoningPart | None
) -> None:
    """The end of the prompt says whether there is any; a prompt that is no conversation has none."""
    edge.stops_with("</think>{}" if expected and expected.is_open else "{}")
    monkeypatch.setattr(ChatTemplate, "render", lambda *_, **__: end)
    body = {"messages": ASK["messages"], "response_format": {"type": "json_object"}}
    answer = await edge.client.post(CHAT, json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "{}"
    await edge.client.post("/v1/completions", json={"prompt": end, "response_format": {"type": "json_object"}})
    structures = [request.sampling.structured_output for request in edge.core.requests]
    assert [structure and structure.reasoning for structure in structures] == [expected, None]


FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}}}  # fmt: skip # noqa: E501
HERMES = '<tool_call>\n{"name":"weather","arguments":{}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"n": 5}', True),
        (HERMES, True),
        (f"{HERMES}\n{HERMES}", True),
        ('{"m": 5}', False),
        (HERMES.replace("weather", "time"), False),
        (f'{HERMES}{{"n": 5}}', False),
    ],
)
async def test_beside_a_format_the_model_calls_or_answers_in_it(edge: Edge, text: str, fits: bool) -> None:
    edge.stops_with("{}")
    answer = await edge.client.post(CHAT, json={**ASK, "response_format": FORMAT})
    assert answer.status_code == 200, answer.text
    structure = edge.core.requests[0].sampling.structured_output
    assert structure is not None
    structure = replace(structure, reasoning=None)
    matcher = StructureCompiler(lambda: edge.tokenizer, [edge.tokenizer.eos_token_id or 0]).compile(structure)
    token_ids = edge.tokenizer.encode(text, add_special_tokens=False)
    assert (matcher.deep_copy().try_consume_tokens(token_ids) == len(token_ids)) == fits


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
TOOLS = [TOOL, {"type": "function", "function": {"name": "a.size", "parameters": CITY}}]
ROME, OSLO = '{"city":"Rome"}', '{"city":"Oslo"}'
LISTED = '[TOOL_CALLS] [{"name":"a.size","arguments":%s}, {"name":"a.size","arguments":%s}]'
NAMED = "[TOOL_CALLS]a.size[ARGS]%s[TOOL_CALLS]a.size[ARGS]%s"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a.size\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>a.size<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
KIMI = (
    "<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.a.size:0<|tool_call_argument_begin|>%s<|tool_call_end|>"
    "<|tool_call_begin|>functions.a.size:1<|tool_call_argument_begin|>%s<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
DEEPSEEK = "<｜tool▁calls▁begin｜>%s\n%s<｜tool▁calls▁end｜>"


def whole_answers(edge: Edge) -> Callable[[str], bool]:
    """Whether a text is an answer that the last request's structure allows."""
    structure = edge.core.requests[-1].sampling.structured_output
    assert structure is not None
    ends = [edge.tokenizer.eos_token_id or 0]
    matcher = StructureCompiler(lambda: edge.tokenizer, ends).compile(replace(structure, reasoning=None))

    def fits(text: str) -> bool:
        token_ids, copy = edge.tokenizer.encode(text, add_special_tokens=False), matcher.deep_copy()
        return copy.try_consume_tokens(token_ids) == len(token_ids) and copy.is_accepting()

    return fits


@pytest.mark.parametrize(
    ("parser", "written"),
    [
        ("mistral", LISTED),
        ("mistral", NAMED),
        ("deepseek", DEEPSEEK % (V3, V3)),
        ("deepseek", DEEPSEEK % (V31, V31)),
        ("kimi", KIMI),
    ],
    ids=["mistral", "mistral v11", "deepseek v3", "deepseek v3.1", "kimi"],
)
async def test_beside_a_format_each_family_calls_in_its_own_way(
    start_edge: StartEdge, parser: str, written: str
) -> None:
    edge = await start_edge(tool_call_parser=parser)
    edge.core.limit = 2000
    edge.stops_with(written % (ROME, OSLO))
    body = {**ASK, "tools": TOOLS, "response_format": FORMAT}
    answer = await edge.client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    calls = [call["function"] for call in answer.json()["choices"][0]["message"]["tool_calls"]]
    assert calls == [{"name": "a.size", "arguments": ROME}, {"name": "a.size", "arguments": OSLO}]
    fits = whole_answers(edge)
    assert fits('{"n": 5}')
    assert fits(written % (ROME, OSLO))
    assert fits((written % (ROME, OSLO)).replace("a.size", "weather"))  # whose arguments are any object
    assert not fits(written % (ROME, '{"city":"Bonn"}'))
    assert not fits((written % (ROME, OSLO)).replace("a.size", "time"))
    assert not fits(written % (ROME, OSLO) + '{"n": 5}')
    assert not fits("Let me see.")


HARMONY = '<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}'  # noqa: E501
CHANNELLED = (
    "<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Sunny."
)


@pytest.mark.parametrize("more", [{}, {"response_format": FORMAT}, {"tool_choice": "required"}])
async def test_a_call_in_channels_with_its_reasoning(start_edge: StartEdge, more: dict[str, Any]) -> None:
    edge = await start_edge(tool_call_parser="openai")
    edge.core.limit = 2000
    edge.stops_with(HARMONY)
    answer = await edge.client.post(CHAT, json={**ASK, **more})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Rome?", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}
    if more:
        structure = edge.core.requests[0].sampling.structured_output
        assert structure is not None
        matcher = StructureCompiler(lambda: edge.tokenizer, [edge.tokenizer.eos_token_id or 0]).compile(structure)
        token_ids = edge.tokenizer.encode(HARMONY, add_special_tokens=False)
        assert matcher.deep_copy().try_consume_tokens(token_ids) == len(token_ids)


async def test_channels_are_told_apart_without_tools(start_edge: StartEdge) -> None:
    edge = await start_edge(tool_call_parser="openai")
    edge.stops_with(CHANNELLED)
    body = {"messages": ASK["messages"]}
    message = (await edge.client.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rome?", "I look.\n\nSunny.")
    events = chunks(await edge.client.post(CHAT, json={**body, "stream": True}))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Rome?"
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look.\n\nSunny."


PYTHONIC = "[a.size(city=\"Rome\"), a.size(city='Oslo')]"
QWEN = "<tool_call>\n<function=a.size>\n<parameter=city>\n%s\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>a.size\n<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("parser", "written"),
    [
        ("pythonic", PYTHONIC),
        ("pythonic", f"<|python_start|>{PYTHONIC}<|python_end|>"),
        ("qwen3_coder", f"{QWEN}\n{QWEN}" % ("Rome", "Oslo")),
        ("glm45", f"{GLM}\n{GLM}" % ("Rome", "Oslo")),
        ("glm45", (GLM + GLM).replace("\n", "") % ("Rome", "Oslo")),
    ],
    ids=["bare", "tagged", "qwen", "glm 4.5", "glm 4.7"],
)
async def test_beside_a_format_arguments_need_not_be_json(start_edge: StartEdge, parser: str, written: str) -> None:
    edge = await start_edge(tool_call_parser=parser)
    edge.core.limit = 2000
    edge.stops_with(written)
    answer = await edge.client.post(CHAT, json={**ASK, "tools": TOOLS, "response_format": FORMAT})
    assert answer.status_code == 200, answer.text
    calls = [call["function"] for call in answer.json()["choices"][0]["message"]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("a.size", {"city": "Rome"}),
        ("a.size", {"city": "Oslo"}),
    ]
    fits = whole_answers(edge)
    assert fits('{"n": 5}')
    assert fits(written)
    assert fits(written.replace("a.size", "weather"))  # whose arguments are any object
    assert not fits(written.replace("Oslo", "Bonn"))
    assert not fits(written.replace("a.size", "time"))
    assert not fits(written + '{"n": 5}')
    assert not fits("[]")


NO_LITERALS = {**TOOL["function"], "parameters": {"type": "object", "properties": {"a": {"oneOf": [{}]}}}}  # type: ignore[dict-item]
UNSAID = {"response_format": FORMAT, "tools": [{"type": "function", "function": NO_LITERALS}]}


@pytest.mark.parametrize(
    ("parser", "body", "field", "reason"),
    [
        ("pythonic", UNSAID, "response_format.json_schema.schema", 'tool "weather": oneOf'),
        ("hermes", {"guided_regex": "[a-z]"}, "guided_regex", "excludes tools"),
    ],
)
async def test_a_format_beside_tools_is_refused_where_no_grammar_has_both(
    start_edge: StartEdge, parser: str, body: dict[str, Any], field: str, reason: str
) -> None:
    edge = await start_edge(tool_call_parser=parser)
    answer = await edge.client.post(CHAT, json={**ASK, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert reason in answer.json()["error"]["message"]
    edge.stops_with("a")
    assert (await edge.client.post(CHAT, json={**ASK, **body, "tool_choice": "none"})).status_code == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_must_be_made_decides_over_a_format_of_text(edge: Edge, choice: object) -> None:
    alone = {**ASK, "tools": TOOLS, "tool_choice": choice}
    edge.stops_with(ROME if isinstance(choice, dict) else f'[{{"name":"a.size","parameters":{ROME}}}]')
    for more in ({}, {"response_format": FORMAT}, {"response_format": {"type": "json_object"}}):
        answer = await edge.client.post(CHAT, json={**alone, **more})
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert (message["content"], len(message["tool_calls"])) == (None, 1)
    structures = {request.sampling.structured_output for request in edge.core.requests}
    assert len(structures) == 1
    for field, more in (("guided_json", {"type": "object"}), ("guided_choice", ["a"])):
        refused = await edge.client.post(CHAT, json={**alone, field: more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_a_tool_that_does_not_exist_is_a_400_that_names_the_field(edge: Edge) -> None:
    choice = {"type": "function", "function": {"name": "wether"}}
    answer = await edge.client.post(CHAT, json={**ASK, "tool_choice": choice})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert "'wether'" in answer.json()["error"]["message"]


async def test_an_answer_with_tools_goes_on_behind_its_tokens(edge: Edge) -> None:
    edge.stops_with(CALLS)
    token_ids = edge.tokenizer.encode(CALLS, add_special_tokens=False)
    cut = len(token_ids) // 2
    had = edge.tokenizer.decode(token_ids[:cut])
    edge.stops_with(CALLS[len(had) :])
    body = {**ASK, "stream": True, "temperature": 0, "resume": {"choices": [{"token_ids": token_ids[:cut]}]}}
    events = chunks(await edge.client.post(CHAT, json=body))
    calls = [part for event in events for part in event["choices"][0]["delta"].get("tool_calls", ())]
    arguments = [part["function"]["arguments"] for part in calls if part["index"] == 1]
    assert "".join(arguments) == '{"city": "Oslo"}'
    body["resume"] = {"choices": [{"token_ids": token_ids[:cut], "num_chars": 1}]}
    refused = await edge.client.post(CHAT, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "resume.num_chars")


async def test_what_a_stop_string_holds_back_comes_once_behind_a_cut(edge: Edge) -> None:
    body = {**ASK, "stream": True, "temperature": 0, "stop": ["\n\n"]}
    first = edge.tokenizer.encode("One\n", add_special_tokens=False)
    edge.stops_with("Two")
    events = chunks(await edge.client.post(CHAT, json={**body, "resume": {"choices": [{"token_ids": first}]}}))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "\nTwo"
