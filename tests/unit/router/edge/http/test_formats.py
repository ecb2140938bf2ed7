"""Deltas in OpenAI's response shapes, before any server is involved."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from services.router.dispatch.record import Ask, RequestRecord
from services.router.dispatch.request import FinishReason, Request, TokenLogprobs
from services.router.edge.http.openai.chat import Chat
from services.router.edge.http.openai.completions import Completions
from services.router.edge.http.openai.logprobs import CompletionLogprobs, chat_logprobs
from services.router.edge.output_stream import OutputDelta, OutputFinish, Usage
from services.router.placement.decision import Choice
from shared.model.text.tokenizer import Tokenizer


def parsed(events: bytes) -> list[Any]:
    lines = events.decode().split("\n\n")
    assert lines.pop() == ""
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


def finish(reason: FinishReason = FinishReason.LENGTH, stop: str | None = None) -> OutputFinish:
    return OutputFinish(reason, stop, Usage(3, 2, 1), RequestRecord(Ask(), choices=[Choice("d0", "p0")]))


def plan(tokenizer: Tokenizer, dialect: Completions | Chat, body: dict[str, Any]) -> tuple[Any, list[Request]]:
    call = dialect.parse(json.dumps(body).encode())
    requests = [Request(f"r-{i}", (70, 71), call.sampling) for i in range(len(call.prompts) * call.n)]
    return call, requests


def completion_stream(tokenizer: Tokenizer, **fields: Any) -> Any:
    call, requests = plan(tokenizer, Completions(tokenizer, "m"), {"prompt": "hi", "stream": True, **fields})
    return call.stream_writer(requests, "r")


def test_a_plain_chunk_is_what_a_json_library_would_have_written(tokenizer: Tokenizer) -> None:
    writer = completion_stream(tokenizer)
    text = 'a"\\\n\u2028🎉\x00'
    first, second = (parsed(writer.events(0, OutputDelta(text, (5,))))[0] for _ in range(2))
    assert first.pop("tandem")["start"]["request_id"] == "r-0"
    assert first == second  # the first is built the general way, the second from the prefix
    assert first["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]
    assert (first["id"], first["object"], first["model"]) == ("cmpl-r", "text_completion", "m")
    assert set(first) == {"id", "object", "created", "model", "choices"}


def test_text_held_back_makes_no_event_but_tokens_asked_for_do(tokenizer: Tokenizer) -> None:
    writer = completion_stream(tokenizer)
    writer.events(0, OutputDelta("a", (5,)))
    assert writer.events(0, OutputDelta("", (6,))) == b""
    writer = completion_stream(tokenizer, return_token_ids=True)
    writer.events(0, OutputDelta("a", (5,)))
    (chunk,) = parsed(writer.events(0, OutputDelta("", (6,))))
    assert chunk["choices"][0]["token_ids"] == [6]
    assert "prompt_token_ids" not in chunk["choices"][0]


def test_a_completion_stream_ends_with_finish_usage_and_done(tokenizer: Tokenizer) -> None:
    writer = completion_stream(tokenizer, stream_options={"include_usage": True}, return_token_ids=True)
    (first,) = parsed(writer.events(0, OutputDelta("a", (5,))))
    assert first["usage"] is None
    assert first["choices"][0]["prompt_token_ids"] == [70, 71]
    (last,) = parsed(writer.events(0, OutputDelta("b", (6,), (), finish(FinishReason.STOP, "##"))))
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["stop_reason"] == "##"
    assert last["tandem"]["decode_worker"] == "d0"
    usage, done = parsed(writer.closing())
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert usage["tandem"]["prefill_worker"] == "p0"
    assert done == "data: [DONE]"


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_continuous_usage_counts_each_choice_in_every_chunk_held_back_tokens_included(
    tokenizer: Tokenizer, kind: str
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2}
    if kind == "chat":
        body = {**options, "messages": [{"role": "user", "content": "hi"}]}
        call, requests = plan(tokenizer, Chat(tokenizer, "m"), body)
    else:
        call, requests = plan(tokenizer, Completions(tokenizer, "m"), {**options, "prompt": "hi"})
    writer = call.stream_writer(requests, "r")
    num_prompt = requests[0].num_prompt_tokens
    deltas = [
        (0, OutputDelta("a", (5,))),
        (0, OutputDelta("", (6,))),  # held back: no chunk
        (1, OutputDelta("b", (7,))),
        (0, OutputDelta("cd", (8, 9))),
        (1, OutputDelta("e", (10,), (), finish())),
    ]
    usages = [[chunk["usage"] for chunk in parsed(writer.events(i, delta)) if delta.text] for i, delta in deltas]
    counted = [last["completion_tokens"] for *_, last in (part for part in usages if part)]
    assert counted == [1, 1, 4, 2]
    if kind == "chat":  # the role comes in a chunk of its own, before the first token
        assert [part[0]["completion_tokens"] for part in usages if len(part) == 2] == [0, 0]
    last = usages[-1][-1]
    assert last == {"prompt_tokens": num_prompt, "completion_tokens": 2, "total_tokens": num_prompt + 2}


def test_echo_comes_before_the_first_text_of_each_choice(tokenizer: Tokenizer) -> None:
    writer = completion_stream(tokenizer, echo=True, prompt=["one ", "two "], n=2)
    texts = [parsed(writer.events(i, OutputDelta("x", (5,))))[0]["choices"][0]["text"] for i in range(4)]
    assert texts == ["one x", "one x", "two x", "two x"]


def test_echo_of_a_token_prompt_is_its_text(tokenizer: Tokenizer) -> None:
    writer = completion_stream(tokenizer, echo=True, prompt=[70, 71])
    (chunk,) = parsed(writer.events(0, OutputDelta("x", (5,))))
    assert chunk["choices"][0]["text"] == tokenizer.decode([70, 71]) + "x"


def test_a_prompts_tokens_count_once_for_its_n_answers(tokenizer: Tokenizer) -> None:
    call, requests = plan(tokenizer, Completions(tokenizer, "m"), {"prompt": ["a", "b"], "n": 3})
    writer = call.body_writer(requests, "r")
    for index in (5, 0, 3, 1, 4, 2):
        writer.add(index, OutputDelta(str(index), (5,), (), finish()))
    body = json.loads(writer.body())
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(i, str(i)) for i in range(6)]
    assert body["usage"]["prompt_tokens"] == 2 * 3
    assert body["usage"]["completion_tokens"] == 6 * 2
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert "tandem" not in body
    assert body["choices"][4]["tandem"]["decode_worker"] == "d0"


def test_the_role_opens_each_chat_choice_once(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2, "return_token_ids": True}
    call, requests = plan(tokenizer, Chat(tokenizer, "m"), body)
    writer = call.stream_writer(requests, "r")
    for index in (0, 1):
        opening, content = parsed(writer.events(index, OutputDelta("a", (5,))))
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert opening["prompt_token_ids"] == [70, 71]
        assert content["choices"][0]["delta"] == {"content": "a"}
        assert content["choices"][0]["token_ids"] == [5]
        (again,) = parsed(writer.events(index, OutputDelta("b", (6,))))
        assert again["choices"][0]["index"] == index
    (last,) = parsed(writer.events(0, OutputDelta("", (7,), (), finish())))
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"


def test_an_answer_of_no_text_at_all_still_has_role_and_finish(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    call, requests = plan(tokenizer, Chat(tokenizer, "m"), body)
    writer = call.stream_writer(requests, "r")
    opening, end = parsed(writer.events(0, OutputDelta("", (257,), (), finish(FinishReason.STOP))))
    assert opening["choices"][0]["delta"]["role"] == "assistant"
    assert end["choices"][0]["finish_reason"] == "stop"


def test_a_plain_chat_chunk_is_what_a_json_library_would_have_written(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True}}
    call, requests = plan(tokenizer, Chat(tokenizer, "m"), body)
    writer = call.stream_writer(requests, "r")
    _, chunk = parsed(writer.events(0, OutputDelta('"🎉', (5,))))
    assert chunk["choices"] == [{"index": 0, "delta": {"content": '"🎉'}, "logprobs": None, "finish_reason": None}]
    assert chunk["usage"] is None


def test_completion_logprobs_are_four_parallel_lists_with_running_offsets(tokenizer: Tokenizer) -> None:
    a, b, c = tokenizer.encode("abc", add_special_tokens=False)
    builder = CompletionLogprobs(tokenizer)
    first = builder.part((a,), (TokenLogprobs(-3.0, ((b, -0.5), (c, -1.0))),))
    second = builder.part((b,), (TokenLogprobs(-0.5, ((b, -0.5),)),))
    assert first == {
        "text_offset": [0],
        "token_logprobs": [-3.0],
        "tokens": ["a"],
        "top_logprobs": [{"b": -0.5, "c": -1.0, "a": -3.0}],
    }
    assert (second["text_offset"], second["top_logprobs"]) == ([1], [{"b": -0.5}])


def test_chat_logprobs_have_bytes_except_for_parts_of_characters(tokenizer: Tokenizer) -> None:
    a, half = tokenizer.encode("aé", add_special_tokens=False)[:2]
    (entry,) = chat_logprobs(tokenizer, (a,), (TokenLogprobs(-0.1, ((a, -0.1), (half, -2.0))),))
    assert entry == {
        "token": "a",
        "logprob": -0.1,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.1, "bytes": [97]},
            {"token": "\ufffd", "logprob": -2.0, "bytes": None},
        ],
    }


def test_tokens_may_be_named_by_their_ids_which_no_two_share(tokenizer: Tokenizer) -> None:
    a, half = tokenizer.encode("aé", add_special_tokens=False)[:2]
    entry = TokenLogprobs(-0.1, ((a, -0.1), (half, -2.0)))
    part = CompletionLogprobs(tokenizer, as_ids=True).part((a, a), (entry, entry))
    assert (part["tokens"], part["text_offset"]) == ([f"token_id:{a}"] * 2, [0, 1])
    assert part["top_logprobs"][0] == {f"token_id:{a}": -0.1, f"token_id:{half}": -2.0}
    (found,) = chat_logprobs(tokenizer, (a,), (entry,), as_ids=True)
    assert (found["token"], found["bytes"]) == (f"token_id:{a}", [97])
    assert found["top_logprobs"][1] == {"token": f"token_id:{half}", "logprob": -2.0, "bytes": None}


@pytest.mark.parametrize("logprob", [-math.inf, -1e30])
def test_an_impossible_token_is_a_number_json_knows(tokenizer: Tokenizer, logprob: float) -> None:
    entry = TokenLogprobs(logprob, ((5, logprob),))
    for found in (CompletionLogprobs(tokenizer).part((5,), (entry,)), chat_logprobs(tokenizer, (5,), (entry,))):
        assert "Infinity" not in json.dumps(found)
        assert "-9999.0" in json.dumps(found)


@pytest.mark.parametrize("length", [1, 3])
def test_an_echoed_prompts_tokens_come_first_and_the_first_has_no_logprob(tokenizer: Tokenizer, length: int) -> None:
    body = {"prompt": [70] * length, "echo": True, "logprobs": 0, "max_tokens": 4}
    call = Completions(tokenizer, "m").parse(json.dumps(body).encode())
    requests = [Request("r", (70,) * length, call.sampling)]
    writer = call.body_writer(requests, "r")
    of_prompt = (TokenLogprobs(-2.0, ((70, -2.0),)),) * (length - 1)
    writer.add(0, OutputDelta("a", (71,), (TokenLogprobs(-1.0, ()),), None, of_prompt))
    writer.add(0, OutputDelta("b", (72,), (TokenLogprobs(-0.5, ()),), finish()))
    found = json.loads(writer.body())["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [None, *[-2.0] * (length - 1), -1.0, -0.5]
    assert len({len(values) for values in found.values()}) == 1
    assert found["text_offset"] == sorted(found["text_offset"])
