"""What is read from a template's source, and how messages are made to fit it."""

from __future__ import annotations

import pytest

from shared.model.text.chat_template import TemplateTraits

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def fit(source: str, **message: object) -> dict[str, object]:
    return dict(TemplateTraits.of(source).fit({"role": "assistant", **message}))  # type: ignore[dict-item]


@pytest.mark.parametrize(("source", "role"), [("{{ 'developer' }}", "developer"), ("{{ 'system' }}", "system")])
def test_a_developer_is_the_system_to_templates_that_know_none(source: str, role: str) -> None:
    assert TemplateTraits.of(source).fit({"role": "developer", "content": "x"})["role"] == role


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("{{ tool_call.arguments | tojson }}", {"a": 1}),
        ("{{ '```json\\n' + tool['function']['arguments'] + '```' }}", '{"a": 1}'),
        ("{{ tool.function.arguments + '\\n' }}", '{"a": 1}'),
    ],
)
def test_arguments_are_an_object_unless_the_template_joins_them_to_text(source: str, arguments: object) -> None:
    (call,) = fit(source, content=None, tool_calls=[CALL])["tool_calls"]  # type: ignore[misc]
    assert call["function"]["arguments"] == arguments


def test_arguments_that_were_cut_off_stay_as_they_are() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": '{"a": '}}
    (fitted,) = fit("{{ arguments | tojson }}", tool_calls=[call])["tool_calls"]  # type: ignore[misc]
    assert fitted["function"]["arguments"] == '{"a": '


def test_null_content_is_empty_text_unless_the_template_tells_calls_by_it() -> None:
    assert fit("{{ message['content'] }}", tool_calls=[CALL])["content"] == ""
    assert fit("{% if message['content'] is none %}", tool_calls=[CALL])["content"] is None
    assert fit("{% if message['content'] is none %}")["content"] == ""
