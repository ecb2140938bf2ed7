"""`/v1/responses` as the OpenAI SDK reads it, over the real server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.router.dispatch.request import FinishReason, TokenDelta
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.unit.router.edge.scripted_core import text_steps

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture
async def edge(start_edge: StartEdge) -> Edge:
    edge = await start_edge(reasoning_parser="think")
    edge.core.limit = 2000
    return edge


async def test_a_text_answer(edge: Edge) -> None:
    edge.stops_with("<think>hm</think>Hello.")
    response = await edge.openai.responses.create(model="acme/tiny", input="hi", instructions="Be brief.")
    assert (response.status, response.output_text, response.error) == ("completed", "Hello.", None)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    (prompt,) = [edge.tokenizer.decode(r.prompt_token_ids) for r in edge.core.requests]
    assert "<system>Be brief.<user>hi" in prompt


async def test_its_events_are_numbered_and_bring_what_the_whole_response_has(edge: Edge) -> None:
    edge.stops_with("Yes." + CALL)
    stream = await edge.openai.responses.create(
        model="acme/tiny",
        input="hi",
        stream=True,
        tools=[TOOL],  # type: ignore[list-item]
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final: Any = events[-1]
    message, call = final.response.output
    assert message.content[0].text == "Yes."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.type] = deltas.get(event.type, "") + event.delta  # type: ignore[union-attr]
    assert deltas == {
        "response.output_text.delta": "Yes.",
        "response.function_call_arguments.delta": '{"city": "Rome"}',
    }


@pytest.mark.parametrize("num_together", [1, 2, 7])
async def test_tokens_of_reasoning_are_counted_and_those_of_the_text_have_log_probabilities_however_they_come(
    edge: Edge, num_together: int
) -> None:
    thought, text = "<think>hm</think>", "a\u2603\u00e9 b\U0001f409"  # characters of several tokens
    steps = text_steps(edge.tokenizer, thought + text, FinishReason.STOP, logprobs=0)
    tokens = [step for step in steps if isinstance(step, TokenDelta)]
    edge.core.script = lambda _: [
        TokenDelta(
            tuple(token for step in part for token in step.token_ids),
            tuple(entry for step in part for entry in step.logprobs),
            part[-1].finish_reason,
        )
        for part in (tokens[i : i + num_together] for i in range(0, len(tokens), num_together))
    ]
    asked = {"model": "acme/tiny", "input": "hi", "include": ["message.output_text.logprobs"]}
    response = await edge.openai.responses.create(**asked)  # type: ignore[call-overload]
    assert response.output_text == text
    entries = response.output[-1].content[0].logprobs
    assert [entry.token for entry in entries[:1] + entries[-2:]] == ["a", "\ufffd", "<|eos|>"]
    of_mark, before_text = (len(edge.tokenizer.encode(each, add_special_tokens=False)) for each in ("<think>", thought))
    assert response.usage.output_tokens_details.reasoning_tokens == before_text - of_mark
    assert len(entries) == len(tokens) - before_text
    stream = await edge.openai.responses.create(stream=True, **asked)  # type: ignore[call-overload]
    deltas = [event async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == text
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in entries]


async def test_an_answer_cut_off_is_incomplete(edge: Edge) -> None:
    edge.says("Hello")
    response = await edge.openai.responses.create(model="acme/tiny", input="hi", max_output_tokens=5)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_calls_and_their_outputs_come_back_as_one_conversation(edge: Edge) -> None:
    edge.stops_with("Sunny.")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    answer = await edge.client.post(PATH, json={"input": items, "tools": [TOOL]})
    assert answer.status_code == 200
    prompt = edge.tokenizer.decode(edge.core.requests[0].prompt_token_ids)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<user><tool_response>\nsunny\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"previous_response_id": "resp_1", "conversation": "c"}, "previous_response_id"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, "include"),
    ],
)
async def test_what_is_not_served_is_refused_in_the_endpoints_own_words(
    edge: Edge, fields: dict[str, Any], param: str
) -> None:
    answer = await edge.client.post(PATH, json={"input": "hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert param.partition(".")[0] in answer.json()["error"]["message"]
