"""What a chat template expects of messages, as far as its source tells: templates differ in a few habits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

JsonValue = str | int | float | bool | None | Sequence["JsonValue"] | Mapping[str, "JsonValue"]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_JOINED_ARGUMENTS = re.compile(
    r"""arguments['"]?\]?\s*[+~]|[+~]\s*\w+(\.function|\[['"]function['"]\])*(\.|\[['"])arguments"""
)
_NULL_CONTENT = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""")
_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The habits of one template."""

    knows_tools: bool  # it reads `tools`
    knows_developer: bool  # it has a developer's messages beside the system's
    joins_arguments: bool  # a call's arguments are text to it, not an object
    tests_null_content: bool  # it tells a call's message by its content being none

    @classmethod
    def of(cls, source: str) -> TemplateTraits:
        """From a template's Jinja source."""
        return cls(
            knows_tools=_TOOLS.search(source) is not None,
            knows_developer="developer" in source,
            joins_arguments=_JOINED_ARGUMENTS.search(source) is not None,
            tests_null_content=_NULL_CONTENT.search(source) is not None,
        )

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
                return {"thinking": fitted[name], **fitted, "reasoning_content": fitted[name]}
        return fitted

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
