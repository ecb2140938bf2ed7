"""A conversation to the text of a prompt: the model's own chat template, and what is done for what it does not know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.errors import InvalidRequest
from shared.model.text.chat_template import ChatTemplate, JsonValue

ChatMessage = Mapping[str, JsonValue]

_EFFORT = "reasoning_effort"
_THINKING = "enable_thinking"

_TOOLS_BEGIN = """\
You may call one or more functions to help with the request. Their signatures, one a line:
<tools>
"""
_TOOLS_END = """
</tools>
To call a function, write its name and arguments as a JSON object between tags:
<tool_call>
{"name": "the function's name", "arguments": {"an argument": "its value"}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages with `role` and `content`, and what else the model's chat template reads."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, JsonValue]] = ()
    variables: Mapping[str, JsonValue] = field(default_factory=dict)  # chat_template_kwargs
    reasoning_effort: str | None = None
    verbosity: str | None = None

    @property
    def num_chars(self) -> int:
        """Characters of all that the client wrote."""
        return _num_chars(self.messages) + _num_chars(self.tools) + _num_chars(self.variables)


def rendered(template: ChatTemplate, prompt: ChatPrompt) -> str:
    """The prompt's text. A template without tools gets them in a system message, and their answers from the user.

    Raises InvalidRequest naming what the model's template has no place for: `reasoning_effort`, `verbosity`, or
    messages that it refuses.
    """
    variables = {**prompt.variables, **_effort(template, prompt), **_verbosity(template, prompt)}
    if template.knows_tools or not template.available:
        return template.render(prompt.messages, tools=list(prompt.tools) or None, variables=variables)
    messages = [_without_tools(message) for message in prompt.messages]
    return template.render(_instructed(messages, prompt.tools), variables=variables)


def _effort(template: ChatTemplate, prompt: ChatPrompt) -> dict[str, JsonValue]:
    """As the template's own variable, or, where it only has a switch, to turn reasoning off and on."""
    effort = prompt.reasoning_effort
    if effort is None:
        return {}
    if template.mentions(_EFFORT):
        return {_EFFORT: effort}
    if template.mentions(_THINKING):
        return {_THINKING: effort != "none"}
    if effort == "none":
        return {}
    raise InvalidRequest(
        f"{_EFFORT}: this model's chat template has no reasoning effort, leave it out or say 'none'", field=_EFFORT
    )


def _verbosity(template: ChatTemplate, prompt: ChatPrompt) -> dict[str, JsonValue]:
    if prompt.verbosity is None:
        return {}
    if template.mentions("verbosity"):
        return {"verbosity": prompt.verbosity}
    if prompt.verbosity == "medium":  # as if it had not been said
        return {}
    raise InvalidRequest(
        "verbosity: this model's chat template has none, leave it out or say 'medium'", field="verbosity"
    )


def _instructed(messages: list[ChatMessage], tools: Sequence[Mapping[str, JsonValue]]) -> list[ChatMessage]:
    """With the tools at the end of a system message that comes first."""
    if not tools:
        return messages
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = _TOOLS_BEGIN + lines + _TOOLS_END
    if messages and messages[0].get("role") in ("system", "developer"):
        first = messages[0]
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _without_tools(message: ChatMessage) -> ChatMessage:
    """Calls as the text that they were, and a tool's answer as a user's message."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    written = [str(message["content"])] if message.get("content") else []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            name = json.dumps(function.get("name"), ensure_ascii=False)
            arguments = function.get("arguments")
            written.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return {"role": "assistant", "content": "\n".join(written)}


def _num_chars(value: JsonValue) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.values()))
    if isinstance(value, Sequence):
        return sum(map(_num_chars, value))
    return 0
