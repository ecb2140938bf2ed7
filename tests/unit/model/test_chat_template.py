"""Chat templates beside those of transformers, and what a model's template can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shared.errors import ConfigError, InvalidRequest, ModelLoadError
from shared.model.text.chat_template import DEFAULT_TEMPLATE, ChatTemplate, template_variables
from shared.model.text.template_traits import TemplateTraits
from shared.model.text.tokenizer import Tokenizer
from tests.demo import DEMO

from .conftest import byte_level_backend, write_tokenizer

HEADERS = """{{- bos_token }}
{%- set loop_messages = messages %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
<|turn|>system
Today: {{ date_string }}
{% if tools is not none %}
Functions:
    {%- for tool in tools %}

{{ tool | tojson(indent=4) }}
    {%- endfor %}
{% endif %}
{{ system_message }}<|end|>
{%- for message in loop_messages %}
    {%- if message.role == 'tool' %}
        {{- '<|turn|>tool\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model calls one function at a time") }}
        {%- endif %}
        {{- '<|turn|>assistant\n' + message.tool_calls[0].function | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|turn|>' + message['role'] + '\n' + message['content'] | trim + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\n' }}
{%- endif %}
"""

TURNS = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You are a helpful assistant.<|im_end|>
    {% endif %}
    {% if message['role'] == 'assistant' %}
{% set content = message['content'] %}
{% if message.reasoning_content is string and (enable_thinking is not defined or enable_thinking) %}
{% set content = '<think>' + message.reasoning_content + '</think>' + content %}
{% endif %}
<|im_start|>assistant
{% generation %}{{ content }}<|im_end|>{% endgeneration %}

    {% else %}
<|im_start|>{{ message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
    {% endif %}
    {% if loop.index > 50 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{% endif %}"""

INSTRUCTIONS = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(index=0, last=none) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501

TEMPLATES = {"headers": HEADERS, "turns": TURNS, "instructions": INSTRUCTIONS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": 'Weather <now> & "later" for a city, °C',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "Hello there, <b>you</b> & 日本"}],
    "system": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "  spaces kept?  "},
    ],
    "turns": [
        {"role": "user", "content": "One?", "name": None},
        {"role": "assistant", "content": " Two. ", "tool_calls": None, "reasoning": "count on"},
        {"role": "user", "content": "Three?"},
    ],
    "jinja in content": [{"role": "user", "content": "{{ 7 * 7 }}{% if x %}{# no #}"}],
    "two users": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "tool call": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "wetter", "arguments": {"city": "Köln"}}}],
        },
        {"role": "tool", "content": {"degrees": 7.5, "rain": True}},
    ],
}


def _folder(folder: Path, **config: Any) -> Path:
    return write_tokenizer(folder, byte_level_backend(), bos_token="<|begin|>", eos_token="<|end|>", **config)


def _load(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder, Tokenizer.load(folder).special_tokens)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("templates")
    return {name: _folder(root / name, chat_template=source) for name, source in TEMPLATES.items()} | {"demo": DEMO}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", [*TEMPLATES, "demo"])
def test_render_equals_apply_chat_template_or_both_refuse(
    folders: dict[str, Path], name: str, conversation: str
) -> None:
    ours, theirs = _load(folders[name]), AutoTokenizer.from_pretrained(folders[name])
    messages = CONVERSATIONS[conversation]
    for options in (
        {},
        {"add_generation_prompt": True},
        {"tools": TOOLS},
        {"enable_thinking": False, "bos_token": "<other>", "add_generation_prompt": True},
    ):
        named = {key: options[key] for key in ("tools",) if key in options}
        prompt = options.get("add_generation_prompt", False)
        variables = {key: value for key, value in options.items() if key in ("enable_thinking", "bos_token")}
        expected, refusal = _render_theirs(theirs, messages, options)
        if refusal is None:
            assert ours.render(messages, add_generation_prompt=prompt, variables=variables, **named) == expected
            continue
        with pytest.raises(InvalidRequest) as caught:
            ours.render(messages, add_generation_prompt=prompt, variables=variables, **named)
        assert caught.value.field == "messages"
        assert refusal in str(caught.value)


TURNS = {
    "begun": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two, and then"}],
    "with blanks": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": " Two, and "}],
    "said before": [
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": "Two"},
    ],
}


@pytest.mark.parametrize("conversation", TURNS)
@pytest.mark.parametrize("name", [*TEMPLATES, "demo"])
def test_a_message_is_continued_as_apply_chat_template_does_it(
    folders: dict[str, Path], name: str, conversation: str
) -> None:
    ours, theirs = _load(folders[name]), AutoTokenizer.from_pretrained(folders[name])
    messages = TURNS[conversation]
    expected, refusal = _render_theirs(theirs, messages, {"continue_final_message": True})
    assert refusal is None
    assert ours.render(messages, continue_final_message=True) == expected
    assert expected.rstrip().endswith(messages[-1]["content"].strip())


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ],
)
def test_what_cannot_be_continued_is_refused(folders: dict[str, Path], last: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="the last message must be an assistant's") as caught:
        _load(folders["demo"]).render([{"role": "user", "content": "One"}, last], continue_final_message=True)
    assert caught.value.field == "continue_final_message"
    changing = ChatTemplate({"default": "{% for m in messages %}{{ m.content | replace('n', 'm') }}{% endfor %}"}, {})
    with pytest.raises(InvalidRequest, match="changes an assistant's text"):
        changing.render([{"role": "assistant", "content": "One"}], continue_final_message=True)


def _render_theirs(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[str, str | None]:
    """The oracle's prompt, and why it refused where it did."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options), None
    except Exception as error:
        return "", str(error)


def test_rendered_prompt_encoded_without_special_tokens_begins_once(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["headers"])
    messages = CONVERSATIONS["system"]
    prompt = _load(folders["headers"]).render(messages)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    theirs = AutoTokenizer.from_pretrained(folders["headers"])
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids.count(theirs.bos_token_id) == 1


def test_raise_exception_becomes_an_invalid_request_that_says_why(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        _load(folders["instructions"]).render(CONVERSATIONS["two users"])
    assert caught.value.details == {"field": "messages"}


def test_content_of_an_unexpected_kind_is_an_invalid_request(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequest, match="do not fit the chat template"):
        _load(folders["instructions"]).render([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    with pytest.raises(InvalidRequest, match="at least one message"):
        _load(folders["instructions"]).render([])


def test_templates_cannot_reach_python_internals(tmp_path: Path) -> None:
    template = _load(_folder(tmp_path, chat_template="{{ messages.__class__.__mro__ }}"))
    with pytest.raises(InvalidRequest, match="unsafe"):
        template.render(CONVERSATIONS["user"])
    template = _load(_folder(tmp_path, chat_template="{{ messages.append(1) }}"))
    with pytest.raises(InvalidRequest, match="unsafe"):
        template.render(CONVERSATIONS["user"])


def test_named_templates_choose_tool_use_when_tools_are_given(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    folder = _folder(tmp_path, chat_template=named)
    ours, theirs = _load(folder), AutoTokenizer.from_pretrained(folder)
    for tools in (None, TOOLS, []):
        expected = theirs.apply_chat_template(CONVERSATIONS["user"], tools=tools, tokenize=False)
        assert ours.render(CONVERSATIONS["user"], tools=tools) == expected


def test_template_files_win_over_the_config(tmp_path: Path) -> None:
    folder = _folder(tmp_path, chat_template="from the config")
    (folder / "chat_template.jinja").write_text("from the file\n")
    assert _load(folder).render(CONVERSATIONS["user"]) == "from the file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    theirs = AutoTokenizer.from_pretrained(folder)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(CONVERSATIONS["user"], tools=tools, tokenize=False)
        assert _load(folder).render(CONVERSATIONS["user"], tools=tools) == expected


def test_model_without_template_refuses_messages_but_loads(tmp_path: Path) -> None:
    template = _load(_folder(tmp_path))
    assert not template.available
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        template.render(CONVERSATIONS["user"])
    assert caught.value.field == "messages"


def test_invalid_template_stops_the_load_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="line 2") as caught:
        _load(_folder(tmp_path, chat_template="fine\n{% if %}"))
    assert caught.value.field == "chat_template"
    with pytest.raises(ModelLoadError, match="list of objects"):
        _load(_folder(tmp_path, chat_template=[{"name": "default"}]))


def test_variables_of_the_setting_count_where_a_request_names_none() -> None:
    variables = template_variables('{"enable_thinking": false, "bos_token": "B"}')
    source = "{{ bos_token }}{{ enable_thinking }}"
    template = ChatTemplate({DEFAULT_TEMPLATE: source}, {"bos_token": "A"}, variables)
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render(messages) == "BFalse"
    assert template.render(messages, variables={"enable_thinking": True}) == "BTrue"
    assert template_variables("") == {}
    for text, why in (("{", "not valid JSON"), ("[]", "must be a JSON object"), ('{"messages": []}', "may not set")):
        with pytest.raises(ConfigError, match=why) as caught:
            template_variables(text)
        assert caught.value.field == "chat_template_kwargs"


def test_a_given_template_takes_the_place_of_the_folders(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, source = folders["turns"], "{% for each in messages %}<{{ each.content }}>{% endfor %}"
    (tmp_path / "own.jinja").write_text(source)
    for given in (source, str(tmp_path / "own.jinja")):
        template = ChatTemplate.load(folder, {}, given)
        assert template.render([{"role": "user", "content": "Hi"}], tools=[{"name": "f"}]) == "<Hi>"
        assert template.source == source
    for given, why in ((str(tmp_path / "none.jinja"), "none.jinja cannot be read"), ("{% if %}", "line 1")):
        with pytest.raises(ModelLoadError, match=why) as caught:
            ChatTemplate.load(folder, {}, given)
        assert caught.value.field == "chat_template"


def test_variables_may_not_replace_the_conversation(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequest, match="may not set messages") as caught:
        _load(folders["turns"]).render(CONVERSATIONS["user"], variables={"messages": []})
    assert caught.value.field == "chat_template_kwargs"


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


def test_text_before_a_call_joins_the_reasoning_where_a_template_takes_one_of_them() -> None:
    refuses = "{{ raise_exception('Cannot pass both content and thinking') }}"
    message = {"content": "I look.", "reasoning": "hm", "tool_calls": [CALL]}
    fitted = fit(refuses, **message)
    assert (fitted["content"], fitted["thinking"]) == ("", "hm\n\nI look.")
    fitted = fit("{{ thinking }}", **message)
    assert (fitted["content"], fitted["thinking"]) == ("I look.", "hm")
    assert fit(refuses, content="I look.", reasoning="hm")["content"] == "I look."


ONE_CALL = """{% for message in messages %}
{% if message.tool_calls %}{{ message.content }}>{{ message.tool_calls[0].function.name }}{% else %}{{ message.content }}{% endif %};
{%- endfor %}"""  # noqa: E501


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ONE_CALL, "hi;two>f;F;>g;G;?;so;"),
        (ONE_CALL + "{% for call in messages[1].tool_calls %}{{ call.id }}{% endfor %}", "hi;two>f;G;F;?;so;"),
    ],
)
def test_calls_of_one_message_are_messages_where_a_template_reads_the_first(source: str, expected: str) -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "two", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "g", "content": "G"},
        {"role": "tool", "tool_call_id": "f", "content": "F"},
        {"role": "tool", "tool_call_id": "h", "content": "?"},
        {"role": "assistant", "content": "so"},
    ]
    text = ChatTemplate({"default": source}, {}).render(conversation)
    assert text.replace("\n", "").removesuffix("fg") == expected


def test_a_function_without_description_has_an_empty_one_where_the_template_joins_it() -> None:
    source = "{% for tool in tools %}{% set tool = tool.function %}{{ '// ' + tool.description + '.' }}{% endfor %}"
    tools = [{"function": {"name": "f"}}, {"function": {"name": "g", "description": "G"}}]
    assert ChatTemplate({"default": source}, {}).render([{"role": "user"}], tools=tools) == "// .// G."


def test_calls_get_ids_that_say_the_function_where_the_template_writes_these_alone() -> None:
    traits = TemplateTraits.of("<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>")

    def call(identity: str, name: str) -> dict[str, Any]:
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": "{}"}}

    conversation: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call("call_1", "weather"), call("call_2", "time")]},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "assistant", "content": None, "tool_calls": [call("functions.weather:2", "weather")]},
        {"role": "tool", "tool_call_id": "functions.weather:2", "content": "rain"},
        {"role": "tool", "tool_call_id": "unknown", "content": "?"},
    ]
    fitted = traits.fit_all(conversation)
    calls = [each["id"] for message in fitted for each in message.get("tool_calls", [])]  # type: ignore[index,union-attr]
    assert calls == ["functions.weather:0", "functions.time:1", "functions.weather:2"]
    results = [message["tool_call_id"] for message in fitted if message["role"] == "tool"]
    assert results == ["functions.time:1", "functions.weather:0", "functions.weather:2", "unknown"]
    assert TemplateTraits.of("{{ messages }}").fit_all(conversation[:1])[0]["tool_calls"][0]["id"] == "call_1"  # type: ignore[index]
