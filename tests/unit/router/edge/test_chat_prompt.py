"""Conversations to prompts: what a template has no place for, and what is done for it."""

from __future__ import annotations

import pytest

from services.router.edge.answer.families import CALL_FORMATS, REASONING, call_format, reasoning_marks
from services.router.edge.text.prompt_tokenizer import ChatPrompt, rendered
from shared.errors import InvalidRequest
from shared.model.text.chat_template import ChatTemplate
from tests.unit.router.edge.scripted_core import TEMPLATE

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def template(source: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": ""})


def test_tools_stand_in_the_system_message_of_a_template_that_has_none() -> None:
    alone = rendered(template(), ChatPrompt([USER], tools=[TOOL]))
    assert alone.startswith("<system>You may call")
    assert '{"name": "f", "description": "d", "parameters": {"type": "object"}}' in alone
    behind = rendered(template(), ChatPrompt([{"role": "system", "content": "Be brief."}, USER], tools=[TOOL]))
    assert behind.startswith("<system>Be brief.\n\nYou may call")
    assert rendered(template(), ChatPrompt([USER])) == "<user>hi<assistant>"


def test_a_template_with_tools_gets_them_itself() -> None:
    source = "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}" + TEMPLATE
    assert rendered(template(source), ChatPrompt([USER], tools=[TOOL])) == "[f]<user>hi<assistant>"
    with_variable = "{{ enable_thinking }}" + TEMPLATE
    prompt = ChatPrompt([USER], variables={"enable_thinking": False})
    assert rendered(template(with_variable), prompt).startswith("False")


@pytest.mark.parametrize(
    ("source", "effort", "expected"),
    [
        ("{{ reasoning_effort }}|", "high", "high|"),
        ("{{ enable_thinking }}|", "none", "False|"),
        ("{{ enable_thinking }}|", "low", "True|"),
        ("|", "none", "|"),
    ],
)
def test_effort_goes_to_the_template_in_its_own_words(source: str, effort: str, expected: str) -> None:
    assert rendered(template(source), ChatPrompt([USER], reasoning_effort=effort)) == expected


def test_what_no_template_reads_is_refused_by_name() -> None:
    for field, prompt in (
        ("reasoning_effort", ChatPrompt([USER], reasoning_effort="high")),
        ("verbosity", ChatPrompt([USER], verbosity="low")),
        ("chat_template_kwargs", ChatPrompt([USER], variables={"messages": []})),
        ("documents", ChatPrompt([USER], documents=[{"text": "a"}])),
    ):
        with pytest.raises(InvalidRequest) as caught:
            rendered(template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"), prompt)
        assert caught.value.field == field
    assert rendered(template(), ChatPrompt([USER], verbosity="medium")) == "<user>hi<assistant>"


def test_a_message_is_continued_also_where_tools_are_written_for_the_template() -> None:
    prompt = ChatPrompt([USER, {"role": "assistant", "content": "Well, "}], tools=[TOOL], continue_final_message=True)
    assert rendered(template(), prompt).endswith("<user>hi<assistant>Well, ")
    assert rendered(template(), ChatPrompt([USER], add_generation_prompt=False)) == "<user>hi"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder"),
        ("{{ tools }}<tool_call>f\n<arg_key>a</arg_key>", "glm45"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi"),
        ("{{ tools }}<|start|>assistant<|channel|>analysis<|message|>", "openai"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
        ("{{ tools }}<|start_header_id|> <|python_tag|>", "llama3_json"),
        ("{{ tools }}<|start_header_id|> [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools }}", "hermes"),
        ("<|start_header_id|>", "hermes"),  # it has no tools: ours are in Hermes' form
    ],
)
def test_a_family_is_told_by_its_template_or_by_a_setting(source: str, name: str) -> None:
    assert call_format(template(source), "auto") is CALL_FORMATS[name]
    assert call_format(template(source), "pythonic") is CALL_FORMATS["pythonic"]


def test_reasoning_is_looked_for_where_the_template_or_a_setting_says_so() -> None:
    assert reasoning_marks(template(), "auto") is None
    assert reasoning_marks(template("{{ '</think>' }}"), "auto") is REASONING["think"]
    assert reasoning_marks(template("{{ '</think>' }}"), "none") is None
    assert reasoning_marks(template(), "mistral") is REASONING["mistral"]
