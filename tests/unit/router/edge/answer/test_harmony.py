"""Harmony over a vocabulary that has its marks as special tokens: what reaches the reader, and what grammars allow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from services.router.edge.answer.events import CallArguments, CallBegun, Content, Event, Reasoning
from services.router.edge.answer.families import CALL_FORMATS, AnswerFormats
from services.router.edge.answer.formats import harmony
from services.router.edge.answer.reader import AnswerReader
from services.router.edge.answer.tool_use import ToolUse
from services.router.edge.http.answer_parts import kept_special
from services.router.edge.http.openai.forced_calls import call_or_answer, forced_structure
from services.router.edge.http.openai.schemas import FunctionTool, Tool
from shared.model.text.chat_template import ChatTemplate
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler
from shared.structure.structured_output import ReasoningPart, StructuredOutput, StructureKind
from tests.demo import DEMO

OPENAI = CALL_FORMATS["openai"]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [Tool(type="function", function=FunctionTool(name=name, parameters=CITY)) for name in ("get", "get_all")]
USE = ToolUse(frozenset({"get", "get_all"}))
THOUGHT = "<|channel|>analysis<|message|>hm, so <b>.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city":"Rome"}'
CALL_BY_ROLE = ' to=functions.get_all<|channel|>commentary json<|message|>{"city":"Rome"}'
FINAL = "<|channel|>final<|message|>"

Fits = Callable[[StructuredOutput, str], bool]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("harmony")
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in harmony.SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def fits(tokenizer: Tokenizer) -> Fits:
    """Whether a text is a whole answer of a structure."""
    ends = [tokenizer.encode(mark, add_special_tokens=False)[0] for mark in (harmony.RETURN, harmony.CALL)]
    compiler = StructureCompiler(lambda: tokenizer, ends)

    def whole(structure: StructuredOutput, text: str) -> bool:
        token_ids, matcher = tokenizer.encode(text, add_special_tokens=False), compiler.compile(structure).deep_copy()
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return whole


@pytest.mark.parametrize("use", [USE, None], ids=["tools", "no tools"])
def test_marks_reach_the_reader_though_special_tokens_are_skipped(tokenizer: Tokenizer, use: ToolUse | None) -> None:
    template = ChatTemplate({"default": "<|start|>assistant<|channel|>final"}, {})
    formats = AnswerFormats.of(template, "auto", "auto")
    reader = AnswerReader(use, formats.calls, formats.reasoning, is_open=False)
    detokenizer = tokenizer.stream(kept=kept_special(use, formats))
    events: list[Event] = []
    for token_id in tokenizer.encode(f"{THOUGHT}{FINAL}Yes, ü.", add_special_tokens=False):
        events += reader.push(detokenizer.push([token_id]))
    events += reader.flush()
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "hm, so <b>."
    assert "".join(event.text for event in events if isinstance(event, Content)) == "Yes, ü."
    assert not any(isinstance(event, CallBegun | CallArguments) for event in events)


def test_forced_calls_are_as_the_model_writes_them(tokenizer: Tokenizer, fits: Fits) -> None:
    required = forced_structure(TOOLS, ToolUse(USE.names, required=True), OPENAI, tokenizer)
    for thought in ("", THOUGHT):
        assert fits(required, thought + CALL)
        assert fits(required, thought + CALL_BY_ROLE)
        assert not fits(required, f"{thought}{FINAL}Rome")
        assert not fits(required, thought + CALL.replace("city", "town"))
        assert not fits(required, thought + CALL.replace("get", "other"))
    named = forced_structure(TOOLS, ToolUse(USE.names, named="get", max_calls=1), OPENAI, tokenizer)
    assert fits(named, THOUGHT + CALL)
    assert not fits(named, THOUGHT + CALL_BY_ROLE)


def test_beside_tools_a_format_has_a_header(tokenizer: Tokenizer, fits: Fits) -> None:
    number = StructuredOutput(StructureKind.CHOICE, choices=("one", "two"), source="guided_choice")
    either = call_or_answer(TOOLS, USE, number, OPENAI, tokenizer)
    for thought in ("", THOUGHT):
        assert fits(either, thought + CALL)
        assert fits(either, thought + CALL_BY_ROLE)
        assert fits(either, f"{thought}{FINAL}two")
        assert not fits(either, f"{thought}{FINAL}three")
        assert not fits(either, f"{thought}two")


def test_a_format_begins_in_the_last_channel(fits: Fits) -> None:
    marks = harmony.CHANNELS.before_text
    part = ReasoningPart(marks.begin, marks.end, is_open=False)
    letters = StructuredOutput(StructureKind.REGEX, "[a-z]{3}", reasoning=part)
    assert fits(letters, f"{THOUGHT}{FINAL}abc")
    assert not fits(letters, f"{THOUGHT}{FINAL}abcd")
    assert not fits(letters, f"{THOUGHT}{CALL}")
