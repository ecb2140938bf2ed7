"""What each client must be able to do. Runs in the clients' environment: it imports nothing of Tandem's."""

from __future__ import annotations

import json
import os
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
