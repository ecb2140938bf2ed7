"""What a streamed completion says, and what a broken one is called."""

from __future__ import annotations

import json

import pytest

from loadtest.clients.base import RequestFailed
from loadtest.clients.completion_events import CompletionEvents, error_failure
from loadtest.records import FailureCause, Reply


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def choice(**fields: object) -> bytes:
    return event(choices=[{"index": 0, "text": "", "finish_reason": None, **fields}])


def read(*chunks: bytes) -> Reply:
    reply = Reply(sent_s=0.0)
    events = CompletionEvents(reply)
    for at_s, chunk in enumerate(chunks, start=1):
        events.feed(float(at_s), chunk)
    events.check_complete()
    return reply


def failure_of(*chunks: bytes) -> FailureCause:
    with pytest.raises(RequestFailed) as raised:
        read(*chunks)
    return raised.value.failure.cause


def test_ids_are_counted_however_many_a_message_has() -> None:
    reply = read(
        choice(token_ids=[4], text="a"),
        choice(token_ids=[5, 6], text=""),
        choice(token_ids=[], finish_reason="length"),
        event(
            choices=[],
            usage={"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
            tandem={"ttft": {"queue_ms": 1.5, "later": 3}, "prefill_worker": "p0", "decode_worker": "d0"},
        ),
        b"data: [DONE]\n\n",
    )
    assert (reply.token_ids, reply.token_times_s, reply.token_counts) == ([4, 5, 6], [1.0, 2.0], [1, 2])
    assert (reply.num_prompt_tokens, reply.num_output_tokens, reply.num_cached_tokens) == (9, 3, 4)
    assert (reply.prefill_worker, reply.decode_worker, reply.finish_reason) == ("p0", "d0", "length")
    assert reply.split is not None
    assert reply.split.queue_ms == 1.5
    assert reply.counts_exact


def test_without_ids_messages_are_timed_and_the_usage_counts() -> None:
    usage = event(choices=[], usage={"prompt_tokens": 2, "completion_tokens": 7})
    reply = read(choice(text="ab"), choice(text="c", finish_reason="stop"), usage, b"data: [DONE]\n\n")
    assert not reply.counts_exact
    assert (reply.token_times_s, reply.num_output_tokens) == ([1.0, 2.0], 7)


def test_neither_ids_nor_usage_cannot_be_counted() -> None:
    assert failure_of(choice(text="ab", finish_reason="stop")) is FailureCause.PROTOCOL


def test_a_stream_that_just_ends_was_cut() -> None:
    assert failure_of(choice(token_ids=[1])) is FailureCause.DISCONNECTED


def test_an_answer_without_tokens_is_none() -> None:
    assert failure_of(choice(finish_reason="stop", token_ids=[])) is FailureCause.PROTOCOL


@pytest.mark.parametrize(
    "chunk",
    [
        b"data: {nope\n\n",
        b"data: 7\n\n",
        event(choices=[3]),
        event(choices=[], usage={"tokens": 1}),
        event(choices=[], tandem={"ttft": {"queue_ms": "long"}}),
    ],
)
def test_events_that_are_no_completions_are_called_so(chunk: bytes) -> None:
    assert failure_of(chunk) is FailureCause.PROTOCOL


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("rate_limit_error", FailureCause.OVERLOADED),
        ("timeout_error", FailureCause.DEADLINE),
        ("invalid_request_error", FailureCause.REJECTED),
        ("server_error", FailureCause.SERVER_ERROR),
    ],
)
def test_an_error_in_mid_stream_has_the_cause_of_its_type(kind: str, cause: FailureCause) -> None:
    error = event(error={"message": "m", "type": kind, "code": "worker_lost", "param": None})
    assert failure_of(choice(token_ids=[1]), error) is cause


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (400, FailureCause.REJECTED),
        (401, FailureCause.REJECTED),
        (408, FailureCause.DEADLINE),
        (429, FailureCause.OVERLOADED),
        (500, FailureCause.SERVER_ERROR),
        (503, FailureCause.SERVER_ERROR),
        (504, FailureCause.DEADLINE),
    ],
)
def test_a_status_has_its_cause(status: int, cause: FailureCause) -> None:
    failure = error_failure(status, {"error": {"message": "m", "type": "t", "code": "c"}}, "3").failure
    assert (failure.cause, failure.kind) == (cause, "c")
    assert ("retry after 3 s" in failure.message) == (status == 429)


def test_a_body_that_is_no_error_object_is_quoted() -> None:
    assert error_failure(502, "<html>bad gateway").failure.message == "<html>bad gateway"
