"""Renders a conversation with the model's own Jinja chat template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ConfigError, InvalidRequest, ModelLoadError
from shared.model.config.json_fields import read_json_object
from shared.model.text.template_traits import JsonValue, Message, TemplateTraits
from shared.model.text.tokenizer_settings import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_MARK = "\ue000continues\ue000"
"""Where a message that is continued ends, in characters that no text has; a blank behind it shows whether a template
trims texts."""


def template_variables(text: str) -> dict[str, JsonValue]:
    """The setting `chat_template_kwargs`: a JSON object, or nothing. Raises ConfigError."""
    field = "chat_template_kwargs"
    try:
        variables = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{field} is not valid JSON: {error}", field=field) from None
    if not isinstance(variables, dict):
        raise ConfigError(f'{field} must be a JSON object, such as {{"enable_thinking": false}}', field=field)
    if taken := [name for name in _RESERVED if name in variables]:
        raise ConfigError(f"{field} may not set {taken[0]}", field=field)
    return variables


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
            if variable in _RESERVED:
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
