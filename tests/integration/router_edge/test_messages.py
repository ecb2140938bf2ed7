"""Anthropic's `/v1/messages` over the real server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shared.errors import Overloaded
from tests.integration.router_edge.conftest import Edge, StartEdge

PATH = "/v1/messages"
TOOL = {"name": "weather", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
ASK = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def edge(start_edge: StartEdge) -> Edge:
    edge = await start_edge(reasoning_parser="think")
    edge.core.limit = 2000
    return edge


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    found = []
    for block in filter(None, answer.text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


async def test_a_message_with_thinking_text_and_a_call(edge: Edge) -> None:
    edge.stops_with("<think>hm</think>Let me see." + CALL)
    message = (await edge.client.post(PATH, json={**ASK, "system": "Be brief.", "tools": [TOOL]})).json()
    thinking, text, call = message["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "Let me see.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "tool_use")
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] == 1
    assert usage["input_tokens"] + 1 == edge.core.requests[0].num_prompt_tokens


async def test_its_events_open_and_close_every_block(edge: Edge) -> None:
    edge.stops_with("<think>hm</think>Yes." + CALL)
    found = events(await edge.client.post(PATH, json={**ASK, "stream": True, "tools": [TOOL]}))
    kinds = [event["type"] for event in found]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1, 2]
    text = {}
    for event in found:
        if event["type"] == "content_block_delta":
            kind, value = (v for v in event["delta"].values())
            text[kind] = text.get(kind, "") + value
    assert text == {
        "thinking_delta": "hm",
        "signature_delta": "",
        "text_delta": "Yes.",
        "input_json_delta": '{"city": "Rome"}',
    }
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_how_it_ended(edge: Edge) -> None:
    edge.says("abc#def")
    stopped = (await edge.client.post(PATH, json={**ASK, "stop_sequences": ["#"]})).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "#")
    assert stopped["content"] == [{"type": "text", "text": "abc"}]
    assert (await edge.client.post(PATH, json=ASK)).json()["stop_reason"] == "max_tokens"


async def test_results_of_tools_come_before_what_the_user_says(edge: Edge) -> None:
    edge.stops_with("Sunny.")
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "go"}, {"type": "tool_result", "tool_use_id": "t1", "content": "s"}],
        },
    ]
    assert (await edge.client.post(PATH, json={**ASK, "messages": messages, "tools": [TOOL]})).status_code == 200
    prompt = edge.tokenizer.decode(edge.core.requests[0].prompt_token_ids)
    assert prompt.index("<tool_response>\ns\n") < prompt.index("<user>go")
    count = await edge.client.post(f"{PATH}/count_tokens", json={"messages": messages, "tools": [TOOL]})
    assert count.json() == {"input_tokens": edge.core.requests[0].num_prompt_tokens}


async def test_what_the_client_says_for_the_assistant_begins_the_answer(edge: Edge) -> None:
    edge.stops_with("Sunny.")
    begun = [*ASK["messages"], {"role": "assistant", "content": [{"type": "text", "text": "The answer is ("}]}]
    message = (await edge.client.post(PATH, json={**ASK, "messages": begun})).json()
    assert edge.tokenizer.decode(edge.core.requests[0].prompt_token_ids).endswith("<assistant>The answer is (")
    assert message["content"] == [{"type": "text", "text": "Sunny."}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' is not served"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124' is not served"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "'x', which tools does not have"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported here"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "output_config.format.schema",
        ),
        ({"output_config": {"format": {"type": "regex", "schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"effort": "most"}}, "output_config.effort"),
        ({"output_config": {"effort": "max"}}, "output_config.effort: this model's chat template has no"),
    ],
)
async def test_what_is_not_served_is_refused_in_anthropics_shape(
    edge: Edge, fields: dict[str, Any], words: str
) -> None:
    answer = await edge.client.post(PATH, json={**ASK, **fields})
    assert answer.status_code == 400
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "invalid_request_error")
    assert words in answer.json()["error"]["message"]


async def test_a_format_holds_the_answer_to_its_schema(edge: Edge) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    edge.stops_with('{"city": "Rome"}')
    fields = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    answer = await edge.client.post(PATH, json={**ASK, **fields})
    assert answer.json()["content"] == [{"type": "text", "text": '{"city": "Rome"}'}]
    structure = edge.core.requests[0].sampling.structured_output
    assert structure is not None
    assert json.loads(structure.text)["required"] == ["city"]
    count = await edge.client.post(f"{PATH}/count_tokens", json={"messages": ASK["messages"], **fields})
    assert count.json() == {"input_tokens": edge.core.requests[0].num_prompt_tokens}


async def test_errors_before_and_within_a_stream_and_the_key_in_anthropics_header(start_edge: StartEdge) -> None:
    edge = await start_edge(api_keys=["k"])
    assert (await edge.client.post(PATH, json=ASK)).json()["error"]["type"] == "authentication_error"
    edge.core.limit = 2000
    edge.core.script = lambda request: [Overloaded("full")]
    answer = await edge.client.post(PATH, json=ASK, headers={"x-api-key": "k"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert "retry-after" in answer.headers


KEEP = {"cache_control": {"type": "ephemeral"}}
KEEP_LONG = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("fields", "retain_s"),
    [
        ({}, 0.0),
        (KEEP, 300.0),
        ({"system": [{"type": "text", "text": "Be brief.", **KEEP}]}, 300.0),
        ({"tools": [{**TOOL, **KEEP_LONG}], "system": [{"type": "text", "text": "Be brief.", **KEEP}]}, 3600.0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi.", **KEEP_LONG}]}]}, 3600.0),
    ],
)
async def test_a_prompt_is_kept_as_long_as_the_longest_cache_control_says(
    edge: Edge, fields: dict[str, Any], retain_s: float
) -> None:
    edge.stops_with("Yes.")
    assert (await edge.client.post(PATH, json={**ASK, **fields})).status_code == 200
    assert [request.retain_s for request in edge.core.requests] == [retain_s]
