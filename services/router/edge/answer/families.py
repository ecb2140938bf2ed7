"""Which family's format a model writes, by its chat template or by a setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from services.router.edge.answer.call_rules import CallGrammar
from services.router.edge.answer.events import Events
from services.router.edge.answer.formats import (
    deepseek,
    glm,
    harmony,
    hermes,
    kimi,
    llama_json,
    mistral,
    pythonic,
    qwen_xml,
)
from services.router.edge.answer.reasoning import Channels, ReasoningMarks
from services.router.edge.answer.scan import Scanner
from services.router.edge.answer.tool_use import ToolUse
from shared.model.text.chat_template import ChatTemplate

CallFormatName = Literal[
    "auto", "hermes", "llama3_json", "pythonic", "mistral", "deepseek", "kimi", "openai", "qwen3_coder", "glm45"
]
ReasoningName = Literal["auto", "none", "think", "mistral"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes tool calls."""

    calls: Callable[[Events, ToolUse], Scanner[None]]
    """Reads a whole answer, behind its reasoning."""
    special: tuple[str, ...]
    """Marks that may be special tokens of the vocabulary: they must stay in the text."""
    grammar: CallGrammar
    """The rules of a grammar for these calls."""
    short_ids: bool = False
    """Its template takes ids of nine letters and digits alone."""
    channels: Channels | None = None
    """Set where it reads every answer, without tools too, and its reasoning."""


CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(hermes.calls, hermes.SPECIAL, hermes.grammar),
    "llama3_json": CallFormat(llama_json.calls, llama_json.SPECIAL, llama_json.grammar),
    "pythonic": CallFormat(pythonic.calls, pythonic.SPECIAL, pythonic.grammar),
    "mistral": CallFormat(mistral.calls, mistral.SPECIAL, mistral.grammar, short_ids=True),
    "deepseek": CallFormat(deepseek.calls, deepseek.SPECIAL, deepseek.grammar),
    "kimi": CallFormat(kimi.calls, kimi.SPECIAL, kimi.grammar),
    "openai": CallFormat(harmony.calls, harmony.SPECIAL, harmony.grammar, channels=harmony.CHANNELS),
    "qwen3_coder": CallFormat(qwen_xml.calls, qwen_xml.SPECIAL, qwen_xml.grammar),
    "glm45": CallFormat(glm.calls, glm.SPECIAL, glm.grammar),
}

REASONING: Mapping[str, ReasoningMarks] = {
    "think": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
}

# What only one family's template has, the most telling first.
_SIGNS = (
    (mistral.MARK, "mistral"),
    (deepseek.CALLS, "deepseek"),
    (kimi.CALLS, "kimi"),
    (qwen_xml.PARAMETER, "qwen3_coder"),
    (glm.KEY, "glm45"),
    (hermes.BEGIN, "hermes"),
    ("func_name1(params_name1", "pythonic"),
    (pythonic.TAG, "pythonic"),
    ("<|start_header_id|>", "llama3_json"),
)


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """How one model writes its answers."""

    calls: CallFormat
    reasoning: ReasoningMarks | None  # None: its answers have none

    @classmethod
    def of(cls, template: ChatTemplate, calls: CallFormatName, reasoning: ReasoningName) -> AnswerFormats:
        """By the settings, where these leave it open by the template."""
        written = call_format(template, calls)
        channels = written.channels
        return cls(written, reasoning_marks(template, reasoning) if channels is None else channels.before_text)


def call_format(template: ChatTemplate, setting: CallFormatName) -> CallFormat:
    """The setting's, or the one that the template is written for; Hermes' where the template names none, as in our own
    words for tools."""
    if setting != "auto":
        return CALL_FORMATS[setting]
    if template.mentions(harmony.SIGN):
        return CALL_FORMATS["openai"]
    if template.knows_tools:
        for sign, name in _SIGNS:
            if template.mentions(sign):
                return CALL_FORMATS[name]
    return CALL_FORMATS["hermes"]


def reasoning_marks(template: ChatTemplate, setting: ReasoningName) -> ReasoningMarks | None:
    """The setting's, or those that the template mentions; None where answers have no reasoning."""
    if setting != "auto":
        return REASONING.get(setting)
    return next((marks for marks in REASONING.values() if template.mentions(marks.end)), None)
