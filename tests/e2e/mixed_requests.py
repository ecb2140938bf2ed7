"""Requests of all kinds, sent at once to a real cluster, and what has to be the same of any two clusters' answers."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.e2e.running import Running

COPIED = [20 + (i * 37) % 900 for i in range(60)]
VERSE = "The king of Judah went up, and the king of Israel went up; and the men of Judah fled before Israel.\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "nameOfTheKing": {"type": "string", "maxLength": 12},
        "agesOfHisSons": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 5},
        "isRemembered": {"type": "boolean"},
    },
    "required": ["nameOfTheKing", "agesOfHisSons", "isRemembered"],
    "additionalProperties": False,
}
TEXTS: list[Any] = ["In the beginning", VERSE * 4, COPIED * 2]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
COMPLETIONS: list[dict[str, Any]] = [
    {"logprobs": 3},
    {**SAMPLED, "top_p": 0.9, "logprobs": 1},
    {**SAMPLED, "top_k": 30, "min_p": 0.02, "n": 2},
    {**SAMPLED, "n": 1, "best_of": 3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {"16": 3.0, "30": -100.0}, "bad_words": ["king", "went up"]},
    {"allowed_token_ids": list(range(10, 400))},
    {"min_tokens": 30, "stop": ["e"], "stop_token_ids": [16, 18]},
    {"stop": ["ael", "nd t"], "include_stop_str_in_output": True},
    {"stop": ["up; ", "ter"], "stream": True},
    {"ignore_eos": True, "max_tokens": 1},
    {"ignore_eos": True, "max_tokens": 2, "stream": True},
    {"echo": True, "logprobs": 1, "max_tokens": 3},
    {"prompt_logprobs": 1},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "king", "schema": SCHEMA}}, "stream": True},
    {"structured_outputs": {"regex": "(abcdefgh [0-9],){6}"}, "temperature": 1.2, "seed": 3},
    {"structured_outputs": {"choice": ["the king of Israel went up", "the king of Judah fled"]}},
]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("crown_him", "bury_him")]
CHATS: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 2},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "required", **SAMPLED},
    {"tools": TOOLS, "tool_choice": "required", "stream": True},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "bury_him"}}},
]
MESSAGES: list[dict[str, Any]] = [{}, {"stop_sequences": ["ael", "the"], "stream": True}]
RESPONSES: list[dict[str, Any]] = [
    {},
    {"text": {"format": {"type": "json_schema", "name": "king", "schema": SCHEMA}}, "stream": True},
]


def mixed() -> list[tuple[str, dict[str, Any]]]:
    """Path and body of each: completions of every text, chats, Anthropic's messages and responses."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": text, "temperature": 0, "max_tokens": 50, "return_token_ids": True, **way})
        for text in TEXTS
        for way in COMPLETIONS
    ]
    ask: list[dict[str, Any]] = [{"role": "user", "content": VERSE * 2}]
    chat = {"messages": ask, "temperature": 0, "max_tokens": 100, "return_token_ids": True}
    asked += [("/v1/chat/completions", chat | way) for way in CHATS]
    asked += [
        ("/v1/messages", {"model": "demo", "messages": ask, "temperature": 0, "max_tokens": 60, **way})
        for way in MESSAGES
    ]
    asked += [
        ("/v1/responses", {"input": VERSE * 2, "temperature": 0, "max_output_tokens": 90, **way}) for way in RESPONSES
    ]
    return asked


async def answers(cluster: Running) -> list[object]:
    """Of all at once, in their order: all that does not differ between two calls of one cluster."""
    return list(await asyncio.gather(*(_answer(cluster, path, body) for path, body in mixed())))


async def _answer(cluster: Running, path: str, body: dict[str, Any]) -> object:
    if body.get("stream"):
        found: dict[str, Any] = {}
        async for event in cluster.events(body, path):
            _join(found, event)
        assert found, body
        return found
    response = await cluster.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return _kept(response.json())


JOINED = ("text", "content", "arguments", "partial_json", "token_ids", "finish_reason", "stop_reason", "stop_sequence")
"""What of a stream's events is joined, however the answer was cut into them; and `delta`, where it is a text."""
DIFFERENT = ("id", "call_id", "created", "created_at", "completed_at", "tandem", "request_id", "system_fingerprint")
BY_CHANCE = ("cached_tokens", "input_tokens", "cache_read_input_tokens", "completion_tokens_details")
"""Which of several requests comes first, and computes what others find, is chance (Anthropic counts these apart); so is
how many guesses an answer had."""


def _join(found: dict[str, Any], event: Any, key: str = "") -> None:
    if isinstance(event, dict):
        for name, value in event.items():
            _join(found, value, name)
    elif isinstance(event, list) and key != "token_ids":
        for value in event:
            _join(found, value, key)
    elif event is not None and (key in JOINED or key == "delta"):
        found[key] = found[key] + event if key in found else event


def _kept(value: Any) -> Any:
    """Without names, times and log-probabilities, whose last bits follow the batch."""
    if isinstance(value, dict):
        return {name: _kept(each) for name, each in value.items() if name not in DIFFERENT + BY_CHANCE}
    if isinstance(value, list):
        return [_kept(each) for each in value]
    return None if isinstance(value, float) else value
