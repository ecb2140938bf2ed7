"""The reference of the HTTP API against the API: every documented field is sent once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shared.seeds import SAMPLER_VERSION
from tests.integration.router_edge.conftest import Edge, StartEdge

PAGE = Path(__file__).parents[3] / "docs" / "api.md"

SCHEMA = {"type": "object", "properties": {}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v1/batches": {"input_file_id": "", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
FLAT_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
ANTHROPIC_TOOL = {"name": "f", "input_schema": SCHEMA}

# A value that asks for something, for each field that works; in a tuple with what the field needs beside it.
WORKS: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": False,
    "allowed_token_ids": [7, 8, 9, 12],
    "background": True,
    "bad_words": ["no"],
    "best_of": 2,
    "early_stopping": False,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "cache_salt": "s",
    "chat_template_kwargs": {"enable_thinking": False},
    "dimensions": 8,
    "documents": [{"title": "a", "text": "b"}],
    "ebnf": 'root ::= "yes" | "no"',
    "echo": True,
    "encoding_format": "base64",
    "frequency_penalty": 0.5,
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "yes" | "no"',
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "guided_whitespace_pattern": (" ?", {"guided_json": SCHEMA}),
    "ignore_eos": True,
    "include": ["message.output_text.logprobs"],
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "instructions": "Be brief.",
    "json_schema": SCHEMA,
    "items": [{"role": "user", "content": "hi"}],
    "logit_bias": {"5": 1.5},
    "logprobs": 2,
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "max_completion_tokens": 5,
    "max_output_tokens": 5,
    "max_tokens": 5,
    "metadata": {"a": "b"},
    "min_p": 0.1,
    "min_tokens": 1,
    "model": "acme/tiny",
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "priority": -3,
    "prompt_logprobs": 1,
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "none",
    "regex": "a+",
    "repetition_penalty": 1.1,
    "request_id": "mine",
    "response_format": {"type": "json_object"},
    "resume": ({"choices": [{"token_ids": [70], "seed": 1, "sampler_version": SAMPLER_VERSION}]}, {"stream": True}),
    "return_documents": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": (True, {"logprobs": True}),
    "return_token_strs": True,
    "safety_identifier": "u",
    "seed": -1,
    "service_tier": "flex",
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_sequences": ["x"],
    "stop_token_ids": [7],
    "speculation": "off",
    "store": True,
    "stream": True,
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "structural_tag": {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]},
    "structured_outputs": {"regex": "a+"},
    "system": "Be brief.",
    "temperature": 0.5,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "top_k": 5,
    "top_n": 1,
    "top_logprobs": (2, {"logprobs": True}),
    "top_p": 0.5,
    "truncate_prompt_tokens": 2,
    "truncation": "auto",
    "user": "u",
    "verbosity": "medium",
}
OF_ONE_PATH: dict[tuple[str, str], Any] = {
    ("/v1/chat/completions", "logprobs"): True,
    ("/v1/chat/completions", "continue_final_message"): (True, {"messages": BEGUN}),
    ("/v1/completions", "return_tokens_as_token_ids"): (True, {"logprobs": 1}),
    ("/tokenize", "add_generation_prompt"): (False, {"prompt": None, **CHAT}),
    ("/tokenize", "continue_final_message"): (True, {"prompt": None, "messages": BEGUN}),
    ("/tokenize", "documents"): ([{"text": "b"}], {"prompt": None, **CHAT}),
    ("/v1/chat/completions", "tools"): [TOOL],
    ("/v1/chat/completions", "tool_choice"): ("auto", {"tools": [TOOL]}),
    ("/v1/responses", "tools"): [FLAT_TOOL],
    ("/v1/responses", "tool_choice"): ({"type": "function", "name": "f"}, {"tools": [FLAT_TOOL]}),
    ("/v1/responses", "stream_options"): {"include_obfuscation": False},
    ("/v1/responses", "top_logprobs"): 2,
    ("/v1/responses", "text"): {"format": {"type": "text"}},
    ("/v1/responses", "reasoning"): {"effort": "none", "summary": "auto"},
    ("/v1/messages", "tools"): [ANTHROPIC_TOOL],
    ("/v1/messages", "tool_choice"): ({"type": "any"}, {"tools": [ANTHROPIC_TOOL]}),
    ("/v1/messages/count_tokens", "tools"): [ANTHROPIC_TOOL],
    ("/v1/messages/count_tokens", "tool_choice"): ({"type": "any"}, {"tools": [ANTHROPIC_TOOL]}),
    ("/tokenize", "messages"): (CHAT["messages"], {"prompt": None}),
    ("/tokenize", "tools"): ([TOOL], {"prompt": None, **CHAT}),
    ("/tokenize", "chat_template_kwargs"): ({"a": 1}, {"prompt": None, **CHAT}),
}


def documented() -> list[tuple[str, str, str]]:
    """(path, field, what the page says of it)."""
    rows: list[tuple[str, str, str]] = []
    for part in PAGE.read_text().split("\n## POST ")[1:]:
        path = part.partition("\n")[0]
        rows += [(path, name, said) for name, said in re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", part, re.MULTILINE)]
    return rows


@pytest.fixture
async def edge(start_edge: StartEdge, tmp_path: Path) -> Edge:
    return await start_edge(batch={"folder": tmp_path / "batches"}, pooling="last")


@pytest.mark.parametrize("path", BODIES)
async def test_every_documented_field_does_what_the_reference_says(edge: Edge, path: str) -> None:
    rows = [(name, said) for at, name, said in documented() if at == path]
    assert rows
    edge.core.limit = 2000
    edge.says("hello")
    made = await edge.openai.conversations.create()
    response = await edge.openai.responses.create(model="acme/tiny", input="hi")
    named = {"conversation": made.id, "previous_response_id": response.id}
    differing = []
    file = await edge.openai.files.create(file=("x", b"{}"), purpose="batch")
    for name, said in rows:
        body = {**BODIES[path], "input_file_id": file.id} if path == "/v1/batches" else BODIES[path]
        if said == "refused":
            body = {**body, name: ["surely not", {"harmless": 0}]}
        elif name not in body:
            value = OF_ONE_PATH.get((path, name), WORKS.get(name, named.get(name)))
            assert value is not None, f"{path}: no example for {name}"
            value, beside = value if isinstance(value, tuple) else (value, {})
            body = {**body, **beside, name: value}
        answer = await edge.client.post(path.replace("{conversation_id}", made.id), json=body)
        refused = answer.status_code == 400 and name in answer.json()["error"]["message"]
        if refused != (said == "refused") or (answer.status_code == 200) == refused:
            differing.append((name, said, answer.status_code, answer.text[:200]))
    assert not differing


@pytest.mark.parametrize(
    ("path", "field", "meant"),
    [
        ("/v1/completions", "temprature", "temperature"),
        ("/v1/chat/completions", "max_new_tokens", "max_tokens"),
        ("/v1/chat/completions", "sufix", None),  # a field of completions
        ("/v1/responses", "max_output_token", "max_output_tokens"),
        ("/v1/messages", "tool_choise", "tool_choice"),
    ],
)
async def test_a_misspelt_field_is_refused_and_an_unknown_one_is_not(
    edge: Edge, path: str, field: str, meant: str | None
) -> None:
    edge.core.limit = 2000
    edge.says("hello")
    answer = await edge.client.post(path, json={**BODIES[path], field: 1})
    if meant is None:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"there is no field {field}: did you mean {meant}?"
    assert (await edge.client.post(path, json={**BODIES[path], field: None, "keep_alive": 5})).status_code == 200


def test_the_reference_has_every_endpoint_that_takes_a_body() -> None:
    assert list(dict.fromkeys(path for path, _, _ in documented())) == list(BODIES)
