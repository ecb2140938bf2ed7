"""Request bodies: what is taken, what is refused, and under which field's name."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from services.router.edge.http.openai.chat import Chat
from services.router.edge.http.openai.completions import CompletionRequest, Completions, parse_completion
from services.router.edge.http.openai.schemas import ChatRequest, parse_chat
from services.router.edge.text.generation_defaults import GenerationDefaults
from shared.engine.sampling_params import BeamSearch, Speculation
from shared.errors import InvalidRequest
from shared.model.text.tokenizer import Tokenizer


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi", **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


@pytest.mark.parametrize(("request_type", "body"), [(CompletionRequest, completion), (ChatRequest, chat)])
def test_what_the_published_schema_does_not_allow_is_refused_by_field(request_type, body) -> None:
    schema = request_type.model_json_schema()
    parse = parse_completion if request_type is CompletionRequest else parse_chat
    for field, part in schema["properties"].items():
        allowed = jsonschema.Draft202012Validator({**part, "$defs": schema["$defs"]})
        for value in ("x", "5", 5, 1.5, True, [True], {"a": 1}):
            if not allowed.is_valid(value):
                with pytest.raises(InvalidRequest) as caught:
                    parse(body(**{field: value}))
                assert caught.value.field == field, value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", [1, "a"]),
        ("prompt", [[1], ["a"]]),
        ("prompt", None),
        ("n", 0),
        ("n", 129),
        ("logprobs", 21),
    ],
)
def test_a_wrong_part_or_number_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(completion(**{field.partition(".")[0]: value}))
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(messages: object, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(messages=messages))
    assert caught.value.field == "messages"
    assert place in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("lora_path", "a"),
        ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
    ],
)
def test_a_known_field_that_completions_do_not_honour_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(completion(**{field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "very"),
        ("metadata", {"a": 1}),
        ("metadata", {str(i): "" for i in range(17)}),
        ("priority", 101),
        ("verbosity", "loud"),
        ("echo", True),
        ("service_tier", "scale"),
    ],
)
def test_a_known_field_that_chat_does_not_honour_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(**{field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["function_call", "audio"])
def test_a_message_part_that_would_be_lost_is_refused_with_its_place(tokenizer: Tokenizer, field: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", field: ["x"]}]
    with pytest.raises(InvalidRequest) as caught:
        Chat(tokenizer, "m").parse(chat(messages=messages))
    assert caught.value.field == f"messages[1].{field}"


def test_harmless_values_of_unsupported_fields_nulls_and_unknown_fields_pass() -> None:
    parse_completion(
        completion(best_of=1, suffix=None, logit_bias={}, temperature=None, stop=None, my_own_field={"a": 1})
    )
    parse_chat(chat(tools=[], tool_choice="none", response_format={"type": "text"}, store=True, user="u"))


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(stream_options={"include_usage": True}))
    assert caught.value.field == "stream_options"
    assert parse_chat(chat(stream=True, stream_options={"include_usage": True})).include_usage
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(stream=True, stream_options={"continuous_usage_stats": True}))
    assert caught.value.field == "stream_options.continuous_usage_stats"
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert parse_chat(chat(stream=True, stream_options=both)).continuous_usage


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(top_logprobs=3))
    assert caught.value.field == "top_logprobs"


def test_of_two_limits_of_the_answer_the_smaller_holds() -> None:
    assert parse_chat(chat(max_tokens=5, max_completion_tokens=6)).max_answer_tokens == 5
    assert parse_chat(chat(max_tokens=7, max_completion_tokens=6)).max_answer_tokens == 6
    assert parse_chat(chat()).max_answer_tokens is None
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(max_completion_tokens=0))
    assert caught.value.field == "max_completion_tokens"


def test_an_answer_of_no_tokens_needs_something_to_say_of_the_prompt(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(completion(max_tokens=0))
    assert caught.value.field == "max_tokens"
    call = Completions(tokenizer, "m").parse(completion(max_tokens=0, echo=True, logprobs=2, prompt_logprobs=3))
    assert (call.sampling.max_tokens, call.sampling.logprobs, call.sampling.prompt_logprobs) == (1, 2, 3)


def test_prompt_logprobs_do_not_go_with_a_stream() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(prompt_logprobs=1, stream=True))
    assert caught.value.field == "prompt_logprobs"


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "a"', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 10**5])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_completion(body)


@pytest.mark.parametrize("body", [b"[1]", b'"x"', b"5"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        parse_completion(body)


def test_a_million_wrong_elements_are_one_error() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(completion(prompt=[True] * 10**6))
    assert len(caught.value.message) < 1000


def test_sampling_fields_reach_the_core_and_minus_one_top_k_is_off() -> None:
    request = parse_completion(
        completion(
            temperature=0, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.1, presence_penalty=1,
            frequency_penalty=-1, seed=3, min_tokens=2, ignore_eos=True, stop="x", stop_token_ids=[4],
            logit_bias={"7": -1.5, "3": 2},
        )
    )  # fmt: skip
    sampling = request.sampling_params(5, 2, GenerationDefaults(temperature=0.6, top_k=20))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, 1)
    assert (sampling.frequency_penalty, sampling.seed, sampling.min_tokens) == (-1, 3, 2)
    assert (sampling.ignore_eos, sampling.stop, sampling.stop_token_ids) == (True, ("x",), (4,))
    assert (sampling.max_tokens, sampling.logprobs) == (5, 2)
    assert sampling.logit_bias == ((3, 2.0), (7, -1.5))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Speculation()),
        ("off", Speculation("off")),
        ({"method": "ngram", "max": 4}, Speculation("ngram", 4)),
        ({"max": 15}, Speculation("auto", 15)),
    ],
)
def test_a_request_says_what_may_be_guessed(given: object, expected: Speculation) -> None:
    request = parse_chat(chat(speculation=given))
    assert request.sampling_params(5, None, GenerationDefaults()).speculation == expected


def test_a_field_that_speculation_has_not_is_refused_with_those_that_it_has() -> None:
    for parse, body in ((parse_chat, chat), (parse_completion, completion)):
        request = parse(body(speculation={"max": 4, "num_tokens": 3}))
        with pytest.raises(InvalidRequest, match="speculation has no field num_tokens: it has method and max"):
            request.sampling_params(5, None, GenerationDefaults())


def test_what_a_request_leaves_open_is_as_the_model_recommends_and_minus_one_is_any_seed() -> None:
    recommended = GenerationDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05, bad_sequences=((3,),))
    sampling = parse_completion(completion(top_k=5, seed=-1)).sampling_params(5, None, recommended)
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.6, 5, 1.05)
    assert (sampling.top_p, sampling.seed, sampling.bad_sequences) == (1.0, None, ((3,),))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("seed", -2),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("max_tokens", 0),
        ("speculation.max", {"max": 16}),
        ("speculation.max", {"max": 0}),
        ("speculation", {"method": "magic"}),
        ("speculation", "magic"),
        ("speculation.k", {"method": "ngram", "k": 4}),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_field(tokenizer: Tokenizer, field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Completions(tokenizer, "m").parse(completion(**{field.partition(".")[0]: value}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("speculation", {"max": "3"}, "speculation.max: input should be a valid integer"),
        (
            "speculation",
            "magic",
            "speculation: input should be 'auto' or 'off'; or speculation: input should be an object",
        ),
        ("stop", ["a", 3], "stop[1]: input should be a valid string"),
    ],
)
def test_what_is_wrong_within_a_value_is_said_without_the_other_types_that_it_might_have(
    field: str, value: object, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(completion(**{field: value}))
    assert str(caught.value) == message


def test_text_parts_are_joined_and_names_are_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_chat(chat(messages=[{"role": "user", "content": parts, "name": "Ada"}]))
    assert request.messages[0].for_template("messages[0]") == {"role": "user", "content": "a\nb", "name": "Ada"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "n": 11}, "best_of"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "length_penalty": 11.0}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "late"}, "early_stopping"),
        ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True, "guided_regex": "a"}, "structured_output"),
        ({"use_beam_search": True, "logit_bias": {"1": 1.0}}, "logit_bias"),
        ({"use_beam_search": True, "speculation": {"method": "ngram"}}, "speculation"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_what_does_not_go_with_a_beam_search_or_the_best_of_several_is_refused(
    tokenizer: Tokenizer, body: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Completions(tokenizer, "m").parse(completion(**body))
    assert caught.value.field is not None
    assert caught.value.field.split(".")[0] == field


def test_a_beam_search_reads_no_sampling_defaults_and_best_of_alone_compares_what_was_drawn(
    tokenizer: Tokenizer,
) -> None:
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, bad_sequences=((3,),))
    dialect = Completions(tokenizer, "m", defaults)
    searched = dialect.parse(completion(use_beam_search=True, n=2, best_of=4, length_penalty=0, early_stopping=True))
    assert searched.sampling.beams == BeamSearch(4, 2, 0.0, "true")
    assert (searched.sampling.temperature, searched.sampling.top_p, searched.sampling.top_k) == (0.0, 1.0, 0)
    assert (searched.n, searched.num_computed) == (2, 4)
    drawn = dialect.parse(completion(n=2, best_of=4))
    assert (drawn.sampling.beams, drawn.sampling.logprobs, drawn.sampling.temperature) == (None, 0, 0.6)
    assert (drawn.n, drawn.num_computed) == (2, 4)


def test_of_thousands_of_wrong_members_some_are_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(metadata={f"a{number}": number for number in range(5000)}))
    assert caught.value.field == "metadata"
    assert len(caught.value.message) < 10_000


def test_a_structure_given_as_a_text_that_is_nested_too_deeply_is_refused_by_name() -> None:
    schema = '{"allOf":[' * 400 + "{}" + "]}" * 400
    fields = {"json": schema, "disable_additional_properties": True}
    with pytest.raises(InvalidRequest, match="nested") as caught:
        parse_chat(chat(structured_outputs=fields)).structured_output()
    assert "json" in str(caught.value.field)
