"""Structured answers of a real cluster, as texts and as calls of a tool."""

from __future__ import annotations

from tests.e2e.running import Running

WORDS = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 5, "maxLength": 20},
        "lines": {
            "type": "array",
            "items": {"type": "string", "minLength": 8, "maxLength": 16},
            "minItems": 16,
            "maxItems": 20,
        },
        "number": {"type": "integer", "minimum": 1000, "maximum": 99999},
    },
    "required": ["title", "lines", "number"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " "},
}
TOOL = {"type": "function", "function": {"name": "sing", "parameters": WORDS}}
NUM_TEXTS, NUM_CALLS = 3, 3
NUM_ANSWERS = NUM_TEXTS + NUM_CALLS


def asked(number: int) -> tuple[dict, str]:
    """Body and path: texts of a schema first, then calls of a tool."""
    text = f"Once upon a time, {number} years ago"
    sampling = {"max_tokens": 1000, "temperature": 0 if number in (0, NUM_TEXTS) else 0.9, "seed": number}
    if number < NUM_TEXTS:
        return {"prompt": text, "guided_json": WORDS, **sampling}, "/v1/completions"
    messages = [{"role": "user", "content": text}]
    tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    return {"messages": messages, **tools, **sampling}, "/v1/chat/completions"


def answered(choice: dict) -> str:
    """What a whole or streamed choice has of the schema's JSON."""
    message = choice.get("message") or choice.get("delta") or {}
    calls = message.get("tool_calls") or ()
    return choice.get("text") or "".join(call["function"]["arguments"] for call in calls)


async def whole(cluster: Running, number: int) -> tuple[str, str]:
    """Text and finish reason of an answer that is not disturbed."""
    body, path = asked(number)
    choice = (await cluster.http.post(path, json=body)).json()["choices"][0]
    return answered(choice), choice["finish_reason"]


class StructuredStream:
    """One client's stream."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.request_id = f"stream-{number}"
        self.text = ""
        self.finish_reason: str | None = None

    async def read(self, cluster: Running) -> tuple[str, str | None]:
        """Text and finish reason, once it has ended."""
        body, path = asked(self.number)
        async for event in cluster.events({**body, "request_id": self.request_id}, path):
            assert "error" not in event, event
            for choice in event.get("choices", ()):
                self.text += answered(choice)
                self.finish_reason = choice["finish_reason"] or self.finish_reason
        return self.text, self.finish_reason
