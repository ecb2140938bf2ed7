"""Renders a conversation with the model's own Jinja chat template, in a sandbox."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest, ModelLoadError
from shared.model.config.json_fields import read_json_object
from shared.model.text.template_variables import RESERVED
from shared.model.text.tokenizer_settings import CONFIG_FILE

JsonValue = str | int | float | bool | None | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
Message = Mapping[str, JsonValue]

_CALL_OF_ID = "<|tool_call_argument_begin|>"
"""In a template that writes calls by their ids."""

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"

_MARK = "\ue000continues\ue000"
"""Where a message that is continued ends, in characters that no text has; a blank behind it shows whether a template
trims texts."""
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


class ChatTemplate:
    """A model's chat templates, compiled. Safe to use from several threads at once."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        variables: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """Compile named templates; without any, `render` raises.

        Args:
            sources: template name → Jinja source.
            special_tokens: texts that templates may name, such as `bos_token`.
            variables: further names that templates may read, where `render` gets none of that name.

        Raises:
            ModelLoadError: a template is not valid Jinja.
        """
        environment = _environment()
        self._names = {**special_tokens, **(variables or {})}
        self._sources = dict(sources)
        self._traits = {name: TemplateTraits.of(source) for name, source in sources.items()}
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ModelLoadError(
                    f"chat template {name!r} is not valid at line {error.lineno}: {error.message}",
                    field="chat_template",
                ) from error

    @classmethod
    def load(
        cls,
        folder: Path,
        special_tokens: Mapping[str, str],
        given: str = "",
        variables: Mapping[str, JsonValue] | None = None,
    ) -> ChatTemplate:
        """Read a model folder: template files, else `chat_template` of `tokenizer_config.json`.

        Args:
            folder: the model's.
            special_tokens: see `__init__`.
            given: a template's file, or its source, which has a brace; read in place of the folder's if not empty.
            variables: see `__init__`.

        Raises:
            ModelLoadError: a template or the file around it is not valid.
        """
        if given:
            return cls({DEFAULT_TEMPLATE: given if "{" in given else _text(Path(given))}, special_tokens, variables)
        return cls(_template_files(folder) or _configured_templates(folder), special_tokens, variables)

    @property
    def available(self) -> bool:
        """Whether the model has a chat template at all."""
        return bool(self._templates)

    @property
    def knows_tools(self) -> bool:
        """Whether a template shows tools to the model."""
        return TOOL_TEMPLATE in self._templates or any(traits.knows_tools for traits in self._traits.values())

    @property
    def source(self) -> str | None:
        """The default template, as the model folder has it; None where there is none."""
        return self._sources.get(DEFAULT_TEMPLATE)

    def mentions(self, text: str) -> bool:
        """Whether a template's source has this text."""
        return any(text in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, JsonValue]] | None = None,
        documents: Sequence[Mapping[str, JsonValue]] | None = None,
        variables: Mapping[str, JsonValue] | None = None,
    ) -> str:
        """The prompt of a conversation, to be encoded with `add_special_tokens=False`.

        Args:
            messages: objects with `role` and `content`, and other fields that the template reads; `TemplateTraits`
                fits them to its habits.
            add_generation_prompt: whether to append the header of the assistant's answer.
            continue_final_message: whether to end within the last message, an assistant's, whose rest is the answer.
            tools: JSON schemas of functions, handed to the template.
            documents: what the answer is to rest on, handed to the template.
            variables: further names the template may read; they override special tokens.

        Raises:
            InvalidRequest: the model has no template, or the template refuses the messages; `field` is
                `messages` (or `chat_template_kwargs` for a reserved name in `variables`, `documents` where the
                template reads none, `continue_final_message` where the last message cannot be continued).
        """
        name = self._name_for(tools)
        if not messages:
            raise InvalidRequest("messages must hold at least one message", field="messages")
        for variable in variables or {}:
            if variable in RESERVED:
                raise InvalidRequest(f"chat_template_kwargs may not set {variable}", field="chat_template_kwargs")
        if documents and "documents" not in self._sources[name]:
            raise InvalidRequest("documents: this model's chat template reads none", field="documents")
        if continue_final_message:
            messages, add_generation_prompt = [*messages[:-1], _to_be_continued(messages[-1])], False
        values = {
            **self._names,
            **(variables or {}),
            "messages": self._traits[name].fit_all(messages),
            "tools": self._traits[name].fit_tools(tools),
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._templates[name].render(values)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"messages do not fit the chat template: {error}", field="messages") from error
        except Exception as error:  # a template raises any Python error on unexpected content
            kind = type(error).__name__
            raise InvalidRequest(f"messages do not fit the chat template: {kind}: {error}", field="messages") from error
        return _up_to_mark(text) if continue_final_message else text

    def _name_for(self, tools: object) -> str:
        if tools is not None and TOOL_TEMPLATE in self._templates:
            return TOOL_TEMPLATE
        if DEFAULT_TEMPLATE in self._templates:
            return DEFAULT_TEMPLATE
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise InvalidRequest(f"this model has no default chat template, only {names}", field="messages")
        raise InvalidRequest("this model has no chat template: send a prompt instead", field="messages")


def _to_be_continued(message: Message) -> Message:
    """The message with a mark at the end of its text."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or message.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message: the last message must be an assistant's, with text and no tool calls",
            field="continue_final_message",
        )
    return {**message, "content": f"{content}{_MARK} "}


def _up_to_mark(text: str) -> str:
    """What a template wrote before the mark; of one that trims texts without the blanks at its end."""
    before, mark, behind = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequest(
            "continue_final_message: this model's chat template changes an assistant's text",
            field="continue_final_message",
        )
    return before if behind.startswith(" ") else before.rstrip()


def _template_files(folder: Path) -> dict[str, str]:
    files = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files[DEFAULT_TEMPLATE] = folder / TEMPLATE_FILE
    return {name: _text(path) for name, path in files.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"chat template {path} cannot be read: {error}", field="chat_template") from error


def _configured_templates(folder: Path) -> dict[str, str]:
    if not (folder / CONFIG_FILE).is_file():
        return {}
    value = read_json_object(folder / CONFIG_FILE).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    templates: dict[str, str] = {}
    for item in value if isinstance(value, list) else [value]:
        name, source = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise ModelLoadError(
                f"{CONFIG_FILE}: chat_template must be a text or a list of objects with name and template",
                field="chat_template",
                file=CONFIG_FILE,
            )
        templates[name] = source
    return templates


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text, for training; here its body renders unchanged."""

    tags: set[str] = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as in training data: Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.now().strftime(template)


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
