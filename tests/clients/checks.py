"""What each client must be able to do. Runs in the clients' environment: it imports nothing of Tandem's."""

from __future__ import annotations

import json
import os
import time
from enum import StrEnum

import anthropic
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = os.environ["TANDEM_CLIENTS_URL"]
MODEL = "demo"
GREEDY = {"temperature": 0}
"""Some SDKs have no such parameter any more."""
ASK = [{"role": "user", "content": "Tell me about Noah."}]


class Kind(StrEnum):
    """A small choice."""

    boat = "boat"
    tower = "tower"


class Thing(BaseModel):
    """What the model is to name."""

    kind: Kind
    large: bool


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["boat", "tower"]}, "large": {"type": "boolean"}},
    "required": ["kind", "large"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "describe", "description": "Describes a thing.", "parameters": SCHEMA}}


def is_thing(arguments: str | dict[str, object]) -> bool:
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    return value["kind"] in ("boat", "tower") and isinstance(value["large"], bool)


@pytest.fixture(scope="module")
def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def claude() -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)


def test_openai_chat_and_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=16, temperature=0)
    stream = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=16, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [model.id for model in client.models.list()] == [MODEL]


def test_openai_logprobs_of_answers_and_of_prompts(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4, logprobs=True, top_logprobs=3)
    content = chat.choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content)
    echo = client.completions.create(model=MODEL, prompt="In the beginning", max_tokens=0, echo=True, logprobs=1)
    found = echo.choices[0].logprobs
    assert "".join(found.tokens).endswith(echo.choices[0].text)  # the token that begins a text comes first
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])


def test_openai_tools_named_required_and_streamed(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "describe"}}
    for wanted in (choice, "required"):
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[TOOL], tool_choice=wanted, parallel_tool_calls=False, max_tokens=200
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "describe"
        assert is_thing(call.function.arguments)
        assert answer.choices[0].finish_reason == "tool_calls"
    follow = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "It floats."}]
    again = client.chat.completions.create(model=MODEL, messages=follow, tools=[TOOL], max_tokens=8)
    assert again.choices[0].message.role == "assistant"
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice, max_tokens=200
    ) as stream:
        final = stream.get_final_completion()
    assert is_thing(final.choices[0].message.tool_calls[0].function.arguments)
    wrong = {"type": "function", "function": {"name": "x"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL], tool_choice=wrong)
    assert caught.value.param == "tool_choice"


def test_openai_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Thing, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Thing)


def test_openai_responses(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Tell me about Noah.", max_output_tokens=16, temperature=0)
    kinds, text = [], ""
    for event in client.responses.create(
        model=MODEL, input="Tell me about Noah.", max_output_tokens=16, temperature=0, stream=True
    ):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == response.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    parsed = client.responses.parse(model=MODEL, input="Name a thing.", text_format=Thing, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Thing)
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    called = client.responses.create(
        model=MODEL,
        input="hi",
        tools=[tool],
        tool_choice={"type": "function", "name": "describe"},
        max_output_tokens=200,
    )
    assert is_thing(called.output[0].arguments)


def test_openai_responses_that_are_kept_and_conversations(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "max_output_tokens": 8, "temperature": 0}
    first = client.responses.create(input="Tell me about Noah.", **fields)
    second = client.responses.create(input="And then?", previous_response_id=first.id, **fields)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert len(client.responses.input_items.list(second.id).data) > 0
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    begun = client.responses.create(input="Tell me about Noah.", background=True, **fields)
    deadline = time.monotonic() + 60
    while begun.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
        begun = client.responses.retrieve(begun.id)
    assert begun.output_text == first.output_text
    conversation = client.conversations.create(metadata={"topic": "flood"})
    client.responses.create(input="Tell me about Noah.", conversation=conversation.id, **fields)
    items = client.conversations.items.list(conversation.id).data
    assert {item.role for item in items} == {"user", "assistant"}
    assert client.conversations.retrieve(conversation.id).metadata == {"topic": "flood"}
    assert client.conversations.delete(conversation.id).deleted


def test_openai_mcp_tools_are_called_and_approved(client: openai.OpenAI) -> None:
    """The server is the protocol's own package. The choice makes the demo model call."""
    tool = {"type": "mcp", "server_label": "things", "server_url": os.environ["TANDEM_CLIENTS_TOOLS"]}
    choice = {"type": "mcp", "server_label": "things", "name": "describe"}
    fields = {"model": MODEL, "input": "Describe a thing.", "max_output_tokens": 250, "temperature": 0}
    asked = client.responses.create(tools=[tool], tool_choice=choice, **fields)
    assert [item.type for item in asked.output] == ["mcp_list_tools", "mcp_approval_request"]
    answer = {"type": "mcp_approval_response", "approval_request_id": asked.output[1].id, "approve": True}
    approved = client.responses.create(
        model=MODEL, input=[answer], previous_response_id=asked.id, tools=[tool], max_output_tokens=8
    )
    assert approved.output[0].type == "mcp_call"
    assert approved.output[0].output.startswith("The ")
    kinds = [
        event.type
        for event in client.responses.create(
            tools=[{**tool, "require_approval": "never"}], tool_choice=choice, stream=True, **fields
        )
    ]
    assert kinds.count("response.mcp_call.completed") >= 1
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_openai_files_and_batches(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "prompt": "And the LORD", "max_tokens": 4}
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(3)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    deadline = time.monotonic() + 120
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"r0", "r1", "r2"}
    assert batch.id in [each.id for each in client.batches.list().data]
    assert client.files.delete(file.id).deleted


def test_openai_embeddings(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model=MODEL, input=["Noah", "the ark"])
    assert [item.index for item in found.data] == [0, 1]
    assert sum(number * number for number in found.data[0].embedding) == pytest.approx(1.0, abs=1e-3)


def test_openai_beam_search_and_best_of(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": "And the LORD", "max_tokens": 8}
    beams = client.completions.create(n=2, best_of=4, extra_body={"use_beam_search": True}, **fields)
    assert len({choice.text for choice in beams.choices}) == 2
    drawn = client.completions.create(n=1, best_of=3, temperature=1, **fields)
    assert len(drawn.choices) == 1


def test_anthropic_cache_control_is_a_hint_that_changes_no_answer(claude: anthropic.Anthropic) -> None:
    system = [
        {"type": "text", "text": "Answer as Genesis would. " * 20, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ]
    fields = {"model": MODEL, "max_tokens": 8, "messages": ASK, "extra_body": GREEDY}
    first, second = (claude.messages.create(system=system, **fields) for _ in range(2))
    assert first.content == second.content
    assert second.usage.cache_read_input_tokens > 0


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model=MODEL, messages=ASK, max_tokens=16, system="Be brief.", extra_body=GREEDY)
    with claude.messages.stream(
        model=MODEL, messages=ASK, max_tokens=16, system="Be brief.", extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason in ("max_tokens", "end_turn")
    assert final.usage.output_tokens == whole.usage.output_tokens
    count = claude.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.")
    assert count.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_anthropic_parse(claude: anthropic.Anthropic) -> None:
    parsed = claude.messages.parse(model=MODEL, max_tokens=500, messages=ASK, output_format=Thing)
    assert isinstance(parsed.parsed_output, Thing)


def test_anthropic_tools(claude: anthropic.Anthropic) -> None:
    tool = {"name": "describe", "input_schema": SCHEMA}
    choice = {"type": "tool", "name": "describe"}
    message = claude.messages.create(model=MODEL, messages=ASK, max_tokens=200, tools=[tool], tool_choice=choice)
    (call,) = message.content
    assert message.stop_reason == "tool_use"
    assert is_thing(call.input)
    with claude.messages.stream(model=MODEL, messages=ASK, max_tokens=200, tools=[tool], tool_choice=choice) as stream:
        assert is_thing(stream.get_final_message().content[0].input)
    follow = [
        *ASK,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "It floats."}]},
    ]
    assert claude.messages.create(model=MODEL, messages=follow, max_tokens=8, tools=[tool]).role == "assistant"
    with pytest.raises(anthropic.BadRequestError, match="tools does not have"):
        claude.messages.create(
            model=MODEL, messages=ASK, max_tokens=8, tools=[tool], tool_choice={"type": "tool", "name": "x"}
        )


def test_langchain_binds_tools_and_gives_structured_output() -> None:
    chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=200, max_retries=0)
    assert chat.invoke("Tell me about Noah.").content
    assert "".join(chunk.text for chunk in chat.stream("Tell me about Noah."))
    (call,) = chat.bind_tools([Thing], tool_choice="Thing").invoke("Name a thing.").tool_calls
    assert is_thing(call["args"])
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Thing, method=method).invoke("Name a thing."), Thing)


def test_litellm_chat_stream_and_tools() -> None:
    options = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "messages": ASK}
    whole = litellm.completion(**options, max_tokens=16, temperature=0)
    parts = litellm.completion(**options, max_tokens=16, temperature=0, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    choice = {"type": "function", "function": {"name": "describe"}}
    called = litellm.completion(**options, tools=[TOOL], tool_choice=choice, max_tokens=200)
    assert is_thing(called.choices[0].message.tool_calls[0].function.arguments)
