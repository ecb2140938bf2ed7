"""Answers as models of each family write them, and the same answers cut in every way."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.edge.answer.events import CallArguments, CallBegun, Content, Event, HeldBlanks, Reasoning
from services.router.edge.answer.families import CALL_FORMATS, REASONING
from services.router.edge.answer.formats import deepseek, glm, harmony, kimi, qwen_xml
from services.router.edge.answer.reader import AnswerReader
from services.router.edge.answer.tool_use import ToolUse

TOOLS = ToolUse(frozenset({"weather", "time"}))
ROME = '{"city": "Rome", "days": [1, 2], "note": "a } \\" ] b"}'
DEEPSEEK_V3 = (
    f"{deepseek.CALLS}{deepseek.CALL}function{deepseek.SEPARATOR}weather\n```json\n{ROME}\n```{deepseek.CALL_END}\n"
    f"{deepseek.CALL}function{deepseek.SEPARATOR}time\n```json\n{{}}\n```{deepseek.CALL_END}{deepseek.CALLS_END}"
)
DEEPSEEK_V31 = (
    f"{deepseek.CALLS}{deepseek.CALL}weather{deepseek.SEPARATOR}{ROME}{deepseek.CALL_END}"
    f"{deepseek.CALL}time{deepseek.SEPARATOR}{{}}{deepseek.CALL_END}{deepseek.CALLS_END}"
)
HERMES = (
    f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "time"}\n</tool_call>'
)
QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n"
    '<parameter=note>\na } " ] b\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=time>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n"
    '<arg_key>note</arg_key>\n<arg_value>a } " ] b</arg_value>\n</tool_call>\n'
    "<tool_call>time\n</tool_call>"
)
BOTH_CALLS = {
    "hermes": [HERMES],
    "llama3_json": [
        f'{{"name": "weather", "parameters": {ROME}}}; {{"name": "time", "parameters": {{}}}}',
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ROME}}}\n{{"name": "time"}}',
    ],
    "mistral": [
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}}}, {{"name": "time", "arguments": {{}}}}]',
        f"[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{ROME}[TOOL_CALLS]time{{}}",
    ],
    "deepseek": [DEEPSEEK_V3, DEEPSEEK_V31],
    "kimi": [
        f"{kimi.CALLS}{kimi.CALL}functions.weather:0{kimi.SEPARATOR}{ROME}{kimi.CALL_END}"
        f"{kimi.CALL}functions.time:1{kimi.SEPARATOR}{{}}{kimi.CALL_END}{kimi.CALLS_END}",
        f"{kimi.CALLS}{kimi.CALL}functions.weather:0{kimi.SEPARATOR}{ROME}{kimi.CALL_END}"
        f"{kimi.CALL}functions.time:1{kimi.SEPARATOR}{kimi.CALL_END}{kimi.CALLS_END}",
    ],
    "openai": [
        f"{harmony.CHANNEL}commentary to=functions.weather {harmony.CONSTRAIN}json{harmony.MESSAGE}{ROME}{harmony.CALL}"
        f"{harmony.NEXT} to=functions.time{harmony.CHANNEL}commentary json{harmony.MESSAGE}{{}}",
        f"{harmony.START}assistant to=weather{harmony.CHANNEL}analysis{harmony.MESSAGE}\n{ROME}{harmony.END}\n"
        f"{harmony.NEXT}{harmony.CHANNEL}commentary to=functions.time{harmony.MESSAGE}{harmony.CALL}",
    ],
    "qwen3_coder": [QWEN, QWEN.replace(f"{qwen_xml.BEGIN}\n", "").replace(f"\n{qwen_xml.END}", "")],
    "glm45": [GLM, GLM.replace("\n", "")],
    "pythonic": [
        "[weather(city='Rome', days=[1, 2], note='a } \" ] b'), time()]",
        '<|python_start|>[weather(city="Rome", days=[1, 2], note=\'a } " ] b\'),time()]<|python_end|>',
    ],
}
CASES = [(name, text) for name, texts in BOTH_CALLS.items() for text in texts]
OPEN = REASONING["think"]


def read(
    name: str, *pieces: str, tools: ToolUse | None = TOOLS, thinks: bool = False, is_open: bool = False
) -> list[Event]:
    """All events, each kind joined, so that what counts is what was found and not when."""
    reader = AnswerReader(tools, CALL_FORMATS[name], OPEN if thinks else None, is_open=is_open)
    events = [event for piece in pieces for event in reader.push(piece)] + reader.flush()
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content | Reasoning) and type(last) is type(event):
            joined[-1] = event._replace(text=last.text + event.text)  # type: ignore[union-attr]
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            assert last.call == event.call
            joined[-1] = event._replace(text=last.text + event.text)
        else:
            joined.append(event)
    return joined


@pytest.mark.parametrize(("name", "text"), CASES)
def test_two_calls_of_each_format(name: str, text: str) -> None:
    begun, arguments, begun_next, arguments_next = read(name, text)
    assert (begun, begun_next) == (CallBegun(0, "weather"), CallBegun(1, "time"))
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == json.loads(ROME)
    assert arguments_next == CallArguments(1, "{}")


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek", "kimi", "qwen3_coder", "glm45"])
def test_text_before_calls_is_content_without_the_blanks_between(name: str) -> None:
    events = read(name, "I will look.\n\n" + BOTH_CALLS[name][0])
    assert events[0] == Content("I will look.")
    assert events[1] == CallBegun(0, "weather")


def test_a_call_of_kimi_behind_a_broken_one_is_found() -> None:
    broken = f"{kimi.CALL}functions.weather:0{kimi.SEPARATOR}no object"
    first, begun, arguments = read("kimi", f"{kimi.CALLS}{broken}{BOTH_CALLS['kimi'][0].removeprefix(kimi.CALLS)}")[:3]
    assert isinstance(first, Content)
    assert first.text.startswith(f"{kimi.CALL}functions.weather:0{kimi.SEPARATOR}n")
    assert begun == CallBegun(0, "weather")
    assert isinstance(arguments, CallArguments)


def test_a_call_of_deepseek_behind_a_broken_one_is_found() -> None:
    broken = f"{deepseek.CALL}weather{deepseek.SEPARATOR}{'x' * 300}"
    first, begun = read("deepseek", f"{deepseek.CALLS}{broken}{DEEPSEEK_V31.removeprefix(deepseek.CALLS)}")[:2]
    assert isinstance(first, Content)
    assert first.text.startswith(f"{deepseek.CALL}weather{deepseek.SEPARATOR}x")
    assert begun == CallBegun(0, "weather")


def test_pythonic_arguments_may_have_names_that_python_keeps_for_itself() -> None:
    text = r"[weather(from='a=b', class={'x': (1, 2)}, face='\ud83d\ude00',), time()]"
    _, arguments, begun, _ = read("pythonic", text)
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {"from": "a=b", "class": {"x": [1, 2]}, "face": "\U0001f600"}
    assert arguments.text.isprintable()
    assert begun == CallBegun(1, "time")


PROSE = [
    "",
    " ",
    "Hello, world.\n",
    '{"answer": 5}',
    '{"name": "Bob", "age": 3}',
    '{"name": 5}',
    "[1, 2, 3]",
    "[weather",
    "[unknown(a=1)]",
    "[weather(1)]",
    "<tool_call>",
    "<tool_call>\nnot json\n</tool_call> and on",
    "a < b, <tool_cal> and [TOOL_CALL]",
    "[TOOL_CALLS] nothing",
    f"{deepseek.CALL} alone",
    f"{kimi.CALL} alone",
    "<|python_tag|>print(1)",
    f"to={kimi.CALL} {harmony.CHANNEL}final",
    '{"name": "weather", "x": "\\ud83d"',
]


@pytest.mark.parametrize("text", PROSE)
@pytest.mark.parametrize("name", sorted(set(CALL_FORMATS)))
def test_what_is_no_call_is_content_to_the_last_character(name: str, text: str) -> None:
    events = read(name, text)
    if name == "llama3_json" and text.startswith('{"name": "weather"'):
        assert events[0] == CallBegun(0, "weather")  # it began like one
        return
    assert events == ([Content(text)] if text else [])


def test_hermes_passes_on_a_call_of_an_unknown_name_and_one_that_is_cut_off() -> None:
    events = read("hermes", '<tool_call>{"name": "other", "arguments": {"a": 1')
    assert events == [CallBegun(0, "other"), CallArguments(0, '{"a": 1')]


def test_arguments_that_come_as_a_string_are_the_json_within() -> None:
    events = read("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": \\"ü\\"}"}</tool_call>')
    assert events == [CallBegun(0, "time"), CallArguments(0, '{"a": "ü"}')]


def test_calls_beyond_the_allowed_ones_are_dropped() -> None:
    events = read("hermes", HERMES, tools=ToolUse(TOOLS.names, max_calls=1))
    assert [event for event in events if isinstance(event, CallBegun)] == [CallBegun(0, "weather")]
    assert isinstance(events[-1], CallArguments)
    assert json.loads(events[-1].text) == json.loads(ROME)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nhm, so\n</think>\n\nYes.", False, [Reasoning("hm, so"), Content("Yes.")]),
        ("hm, so\n</think>\n\nYes.\n", True, [Reasoning("hm, so"), Content("Yes.\n")]),
        ("<think>\n\n</think>\n\nYes.", False, [Content("Yes.")]),
        ("Yes. </think>", False, [Content("Yes. </think>")]),
        ("hm", True, [Reasoning("hm")]),
        ("<thin", False, [Content("<thin")]),
        ("<think>hm</thin", False, [Reasoning("hm</thin")]),
    ],
)
def test_reasoning_comes_before_the_answer(text: str, is_open: bool, expected: list[Event]) -> None:
    assert read("hermes", text, tools=None, thinks=True, is_open=is_open) == expected


def test_reasoning_and_then_calls() -> None:
    events = read("hermes", "<think>which?</think>\n\n" + HERMES, thinks=True)
    assert events[:2] == [Reasoning("which?"), CallBegun(0, "weather")]


def test_forced_calls_are_json_and_nothing_else() -> None:
    named = ToolUse(TOOLS.names, named="weather", max_calls=1)
    assert read("mistral", ROME, tools=named, thinks=True) == [CallBegun(0, "weather"), CallArguments(0, ROME)]
    listed = f'[{{"name": "weather", "parameters": {ROME}}}, {{"name": "time", "parameters": {{}}}}]'
    events = read("mistral", listed, tools=ToolUse(TOOLS.names, required=True))
    assert events[0] == CallBegun(0, "weather")
    assert events[2:] == [CallBegun(1, "time"), CallArguments(1, "{}")]


THOUGHT = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}Which? {harmony.END}{harmony.NEXT}"
WHOLE_HARMONY = [
    (
        f"{THOUGHT}{harmony.CHANNEL}final{harmony.MESSAGE}2 + 2 = 4.\n",
        [Reasoning("Which?"), Content("2 + 2 = 4.\n")],
    ),
    (
        f"{THOUGHT}{harmony.CHANNEL}analysis{harmony.MESSAGE}\nOr\n\nthat.{harmony.END}{harmony.NEXT}"
        f"{harmony.CHANNEL}commentary{harmony.MESSAGE}I look.{harmony.END}{harmony.NEXT}"
        f"{harmony.CHANNEL}commentary to=functions.time {harmony.CONSTRAIN}json{harmony.MESSAGE}{{}}",
        [Reasoning("Which?\n\nOr\n\nthat."), Content("I look."), CallBegun(0, "time"), CallArguments(0, "{}")],
    ),
    (
        f"{harmony.CHANNEL}commentary{harmony.MESSAGE}One.{harmony.END}{THOUGHT}"
        f"{harmony.CHANNEL}final {harmony.CONSTRAIN}json{harmony.MESSAGE}{{}}{harmony.RETURN}",
        [Content("One."), Reasoning("Which?"), Content("\n\n{}")],
    ),
    (
        f"{harmony.CHANNEL}analysis to=python code{harmony.MESSAGE}print(1){harmony.END}",
        [Reasoning("print(1)")],
    ),
    (f"{THOUGHT}{harmony.CHANNEL}fin", [Reasoning("Which?")]),
    (f"{THOUGHT}Yes.", [Reasoning("Which?"), Content(f"{harmony.NEXT}Yes.")]),
    (f"{harmony.CHANNEL}analysis{harmony.MESSAGE}Which", [Reasoning("Which")]),
    (f"{harmony.CHANNEL}final{harmony.MESSAGE}a <|b|> <|en", [Content("a <|b|> <|en")]),
    (
        f"{harmony.CHANNEL}commentary to=functions.time code{harmony.MESSAGE}now()",
        [Content(f"{harmony.CHANNEL}commentary to=functions.time code{harmony.MESSAGE}now()")],
    ),
    (
        f'{harmony.CHANNEL}commentary to=functions.time json{harmony.MESSAGE}{{"a": 1',
        [CallBegun(0, "time"), CallArguments(0, '{"a": 1')],
    ),
]


@pytest.mark.parametrize(("text", "expected"), WHOLE_HARMONY)
def test_harmony_is_told_apart_by_channel_and_recipient(text: str, expected: list[Event]) -> None:
    assert read("openai", text) == expected


def test_harmony_is_read_without_tools_and_its_calls_are_dropped() -> None:
    for text, expected in WHOLE_HARMONY:
        left = [event for event in expected if isinstance(event, Content | Reasoning)]
        assert read("openai", text, tools=None) == left


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
MARKS += [*glm.SPECIAL, "weather", "<function=", "time>", "<parameter=", "city>", "</parameter>", "</function>"]
MARKS += [*harmony.SPECIAL, harmony.NEXT, "commentary", "final", "analysis", " to=functions.time", THOUGHT]
CUT_OFF = ['{"name": "weather", "parameters": ', "[weather(a=1)", "word "]
pieces = st.sampled_from([HERMES, DEEPSEEK_V3, ROME, *MARKS, *CUT_OFF, *']{}["\\\n;,'])


WHOLE_HARMONY_CASES = [("openai", text) for text, _ in WHOLE_HARMONY]


@given(
    st.sampled_from(sorted(CALL_FORMATS)),
    st.lists(pieces, max_size=8).map("".join) | st.sampled_from([text for _, text in CASES + WHOLE_HARMONY_CASES]),
    st.booleans(),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_however_the_text_is_cut_the_same_is_found(name: str, text: str, thinks: bool, cuts: list[int]) -> None:
    whole = read(name, text, thinks=thinks)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [text[a:b] for a, b in pairwise(places)]
    assert read(name, *parts, thinks=thinks) == whole
    assert read(name, *text, thinks=thinks) == whole


@given(st.lists(st.text(st.sampled_from("a \n\t"), max_size=5)), st.sampled_from(["", "\n\n"]))
def test_only_blanks_at_the_end_of_a_text_wait(pieces: list[str], waiting: str) -> None:
    held, certain = HeldBlanks(waiting), ""
    for piece in pieces:
        certain += held.add(piece)
        assert certain == certain.rstrip()
    rest = held.take()
    assert not rest.strip()
    assert certain + rest == waiting + "".join(pieces)
    assert held.take() == ""


def test_a_long_text_at_once_is_one_event_of_each_kind() -> None:
    reader = AnswerReader(TOOLS, CALL_FORMATS["hermes"], REASONING["think"], is_open=True)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "' + "R" * 5000 + '"}}\n</tool_call>'
    found = reader.push("thought " * 1000 + "</think>" + " " * 3000 + "word " * 1000 + call)
    assert [type(event) for event in found] == [Reasoning, Content, CallBegun, CallArguments]
    assert found[0] == Reasoning(("thought " * 1000).rstrip())
    assert found[1] == Content(("word " * 1000).rstrip())
