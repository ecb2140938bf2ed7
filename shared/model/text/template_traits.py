"""The habits of chat templates, and conversations as a template takes them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

JsonValue = str | int | float | bool | None | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
Message = Mapping[str, JsonValue]

_CALL_OF_ID = "<|tool_call_argument_begin|>"
"""In a template that writes calls by their ids."""
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_JOINED_ARGUMENTS = re.compile(
    r"""arguments['"]?\]?\s*[+~]|[+~]\s*\w+(\.function|\[['"]function['"]\])*(\.|\[['"])arguments"""
)
_NULL_CONTENT = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""")
_JOINED_DESCRIPTION = re.compile(r"""[+~]\s*tool\.description""")
_FIRST_CALL = re.compile(r"""\btool_calls['"]?\]?\[0\]""")
_ALL_CALLS = re.compile(r"""\bin\s+([\w\[\]]+(\.|\[['"]))?tool_calls\b|tool_calls['"]?\]?\s*\|\s*length""")
_ONE_THOUGHT = "both content and thinking"
_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The habits of one template."""

    knows_tools: bool  # it reads `tools`
    knows_developer: bool  # it has a developer's messages beside the system's
    joins_arguments: bool  # a call's arguments are text to it, not an object
    tests_null_content: bool  # it detects a message with tool calls by its null content
    joins_description: bool  # a function without a description is an error to it
    takes_one_call: bool  # it reads the first of a message's calls and skips the others
    joins_thoughts: bool  # it refuses a message with tool calls that has both text and reasoning
    names_by_id: bool  # of a call it writes the id alone, which has to say the function, as Kimi's does

    @classmethod
    def of(cls, source: str) -> TemplateTraits:
        """From a template's Jinja source."""
        return cls(
            knows_tools=_TOOLS.search(source) is not None,
            knows_developer="developer" in source,
            joins_arguments=_JOINED_ARGUMENTS.search(source) is not None,
            tests_null_content=_NULL_CONTENT.search(source) is not None,
            joins_description=_JOINED_DESCRIPTION.search(source) is not None,
            takes_one_call=_FIRST_CALL.search(source) is not None and _ALL_CALLS.search(source) is None,
            joins_thoughts=_ONE_THOUGHT in source,
            names_by_id=_CALL_OF_ID in source,
        )

    def fit_tools(self, tools: Sequence[Mapping[str, JsonValue]] | None) -> Sequence[Mapping[str, JsonValue]] | None:
        """Tools as the template takes them."""
        if not self.joins_description or tools is None:
            return tools
        return [
            {**tool, "function": {"description": "", **function}} if isinstance(function, Mapping) else tool
            for tool in tools
            for function in (tool.get("function"),)
        ]

    def fit_all(self, messages: Sequence[Message]) -> list[dict[str, JsonValue]]:
        """A conversation as the template takes it."""
        fitted = [self.fit(message) for message in (_one_call_each(messages) if self.takes_one_call else messages)]
        return _named_by_id(fitted) if self.names_by_id else fitted

    def fit(self, message: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """A message as the template takes it: without null fields, but for content where it looks for none."""
        fitted: dict[str, JsonValue] = {name: value for name, value in message.items() if value is not None}
        if fitted.get("role") == "developer" and not self.knows_developer:
            fitted["role"] = "system"
        if "content" not in fitted and "role" in fitted:
            fitted["content"] = None if self.tests_null_content and "tool_calls" in fitted else ""
        calls = fitted.get("tool_calls")
        if isinstance(calls, Sequence) and not isinstance(calls, str):
            fitted["tool_calls"] = [self._fit_call(call) for call in calls]
        for name in _REASONING_NAMES:
            if name in fitted:
                return self._fit_reasoning(fitted, fitted[name])
        return fitted

    def _fit_reasoning(self, message: dict[str, JsonValue], reasoning: JsonValue) -> dict[str, JsonValue]:
        """A message with its reasoning under each name, and its text within where the template takes only one."""
        text = message.get("content")
        if self.joins_thoughts and "tool_calls" in message and text and reasoning:
            joined = f"{reasoning}\n\n{text}"
            return {**message, "thinking": joined, "reasoning_content": joined, "content": ""}
        return {"thinking": reasoning, **message, "reasoning_content": reasoning}

    def _fit_call(self, call: JsonValue) -> JsonValue:
        """A call with its arguments as an object, unless the template joins them to text."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or self.joins_arguments:
            return call
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            return call
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = arguments  # a model's call that was cut off, given back as it was
        return {**call, "function": {**function, "arguments": parsed}}


def _named_by_id(messages: Sequence[dict[str, JsonValue]]) -> list[dict[str, JsonValue]]:
    """The conversation with ids of calls such as `functions.weather:0`, counted from its first call, and the results
    with the ids of their calls."""
    numbers, renamed = itertools.count(), dict[JsonValue, JsonValue]()
    made: list[dict[str, JsonValue]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, Sequence) and not isinstance(calls, str):
            named: list[JsonValue] = []
            for call in calls:
                function = call.get("function") if isinstance(call, Mapping) else None
                if isinstance(call, Mapping) and isinstance(function, Mapping):
                    identity = f"functions.{function.get('name')}:{next(numbers)}"
                    if isinstance(call.get("id"), str):
                        renamed[call["id"]] = identity
                    call = {**call, "id": identity}
                named.append(call)
            message = {**message, "tool_calls": named}
        of_call = message.get("tool_call_id")
        if isinstance(of_call, str) and of_call in renamed:
            message = {**message, "tool_call_id": renamed[of_call]}
        made.append(message)
    return made


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The conversation with a message for each call, each followed by the results that name it."""
    made: list[Message] = []
    position = 0
    while position < len(messages):
        message, position = messages[position], position + 1
        calls = message.get("tool_calls")
        if not isinstance(calls, Sequence) or isinstance(calls, str) or len(calls) < 2:
            made.append(message)
            continue
        results: list[Message] = []
        while position < len(messages) and messages[position].get("role") == "tool":
            results.append(messages[position])
            position += 1
        for number, call in enumerate(calls):
            made.append({**(message if number == 0 else {"role": message.get("role")}), "tool_calls": [call]})
            identity = call.get("id") if isinstance(call, Mapping) else None
            made += [result for result in results if result.get("tool_call_id") == identity]
            results = [result for result in results if result.get("tool_call_id") != identity]
        made += results  # of no call
    return made
