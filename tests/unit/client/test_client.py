"""The client: its options, and a conversation that continues elsewhere."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import numpy as np
import pytest

from services.router.dispatch.request import Request
from services.router.edge.http.endpoint import sub_requests
from shared.engine.sampling_params import SamplingParams
from shared.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    Internal,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    TakenOver,
    WorkerLost,
)
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from tandem import Answer, TandemClient
from tandem.conversation import Conversation
from tandem.failures import RouterLost
from tandem.options import deadline_of, metadata_of, requests_of
from tandem.router_choice import MAX_PAUSE_S, Targets, pause_s

LOST = RouterLost("gone")


def conversation(targets: Targets | None = None, **limits) -> Conversation:
    given = {"timeout_s": None, "retry_for_s": 30.0, **limits}
    (request,) = requests_of("hi", 1, {"request_id": "r"})
    return Conversation(request, targets or Targets(["a:1", "b:2"], random.Random(1)), random.Random(1), **given)


def message(text: str, *token_ids: int, **fields) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(text=text, token_ids=token_ids, **fields)


def begun(**limits) -> Conversation:
    """With two tokens of a first call."""
    talk = conversation(**limits)
    talk.call(0.0)
    talk.take(message("ab", 5, start=inference_pb2.Start(seed=9, max_tokens=50, router="router-0")), 1.0)
    talk.take(message("é", 6), 2.0)
    return talk


def test_the_next_call_goes_elsewhere_with_all_that_is_needed() -> None:
    talk = begun()
    first = talk._target
    assert talk.failed(LOST, 3.0) < 0.1
    call = talk.call(3.1)
    assert call.target != first
    assert (call.request.request_id, call.request.text) == ("r", "hi")
    assert (list(call.request.resume.token_ids), call.request.resume.num_chars) == ([5, 6], 3)
    assert (call.request.sampling.seed, call.request.sampling.max_tokens) == (9, 50)
    talk.take(message("c", 7, finish_reason=types_pb2.FINISH_REASON_STOP), 4.0)
    assert talk.done
    assert (talk.answer.text, talk.answer.token_ids, talk.answer.num_calls) == ("abéc", [5, 6, 7], 2)
    assert (talk.answer.ttft_ms, talk.answer.tpot_ms) == (1000.0, 1500.0)


def test_a_call_that_brought_nothing_is_taken_over_too() -> None:
    talk = conversation()
    assert not talk.call(0.0).request.HasField("resume")
    talk.failed(LOST, 1.0)
    call = talk.call(1.0)
    assert call.request.HasField("resume")
    assert not call.request.resume.token_ids
    assert not call.request.sampling.HasField("seed")


def test_it_gives_up_when_nothing_new_came_for_too_long() -> None:
    talk = begun(retry_for_s=10.0)
    for now in (3.0, 6.0, 9.0):
        talk.failed(LOST, now)
        talk.call(now)
    talk.take(message("c", 7), 11.0)
    for now in (12.0, 20.0):  # from the first failure since that token
        talk.failed(LOST, now)
        talk.call(now)
    with pytest.raises(RouterLost):
        talk.failed(LOST, 22.0)


def test_the_deadline_holds_over_all_calls() -> None:
    talk = begun(timeout_s=10.0)
    talk.failed(LOST, 4.0)
    assert talk.call(4.0).timeout_s == 6.0
    with pytest.raises(DeadlineExceeded):
        talk.failed(LOST, 9.99)
    with pytest.raises(DeadlineExceeded):
        talk.call(10.0)


def test_the_clock_starts_at_the_first_call() -> None:
    talk = conversation(timeout_s=10.0)
    assert talk.call(100.0).timeout_s == 10.0
    talk.take(message("a", 5), 101.0)
    assert talk.answer.ttft_ms == 1000.0
    talk.failed(LOST, 109.0)


def test_what_another_client_took_does_not_count_in_the_time_per_token() -> None:
    talk = conversation(resume=Answer("r", text="abc", token_ids=[5, 6, 7], num_calls=1))
    talk.call(1000.0)
    talk.take(message("d", 8), 1001.0)
    talk.take(message("e", 9), 1002.0)
    talk.take(message("f", 10, finish_reason=types_pb2.FINISH_REASON_STOP), 1004.0)
    assert talk.answer.tpot_ms == 1500.0


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=3.0), QuotaExceeded("enough", retry_after_s=3.0)])
def test_a_refusal_is_final_at_first_and_a_pause_in_mid_answer(error) -> None:
    fresh = conversation()
    fresh.call(0.0)
    with pytest.raises(type(error)):
        fresh.failed(error, 0.0)
    talk = begun()
    where = talk._target
    assert talk.failed(error, 3.0) >= 3.0
    assert talk.call(6.0).target == where  # the router is well


@pytest.mark.parametrize("error", [Draining("ends"), WorkerLost("no worker")])
def test_a_router_that_cannot_serve_sends_even_a_new_request_elsewhere(error) -> None:
    talk = conversation()
    first = talk.call(0.0).target
    talk.failed(error, 0.0)
    assert talk.call(0.0).target != first


@pytest.mark.parametrize("error", [Internal("bug"), InvalidRequest("no"), TakenOver("elsewhere"), DeadlineExceeded("")])
def test_what_another_call_would_not_mend_is_raised(error) -> None:
    talk = begun()
    with pytest.raises(type(error)):
        talk.failed(error, 3.0)


def test_where_no_router_ever_answered_it_fails_at_once() -> None:
    talk = conversation()
    talk.call(0.0)
    talk.failed(LOST, 0.0)
    talk.call(0.0)
    with pytest.raises(RouterLost, match="gone; is it a router's gRPC address"):
        talk.failed(LOST, 0.0)


def test_a_client_stays_with_a_router_that_answers_and_clients_spread() -> None:
    firsts = {Targets(["a:1", "b:2", "c:3"], random.Random(seed)).choose() for seed in range(20)}
    assert firsts == {"a:1", "b:2", "c:3"}
    targets = Targets(["a:1", "b:2", "a:1"], random.Random(1))
    first = targets.choose()
    assert targets.choose() == first
    targets.failed(first)
    second = targets.choose()
    assert {first, second} == {"a:1", "b:2"} == set(targets.all)
    targets.failed(second)
    assert targets.choose() == first


def test_pauses_grow_and_are_never_the_same_for_all() -> None:
    longest = [max(pause_s(n, random.Random(seed)) for seed in range(50)) for n in (1, 2, 4, 40)]
    assert longest == sorted(longest)
    assert longest[0] < 0.05
    assert longest[-1] <= MAX_PAUSE_S
    assert len({pause_s(40, random.Random(seed)) for seed in range(50)}) == 50


@pytest.mark.parametrize("targets", [[], "a:1", ["a"], ["a:0"], ["a:1"] * 65])
def test_bad_targets_are_named(targets) -> None:
    with pytest.raises(ConfigError) as caught:
        Targets(targets, random.Random())
    assert caught.value.field == "targets"


def test_prompts_of_each_kind() -> None:
    (text,) = requests_of("hi", 1, {})
    (tokens,) = requests_of([4, 5], 1, {})
    (chat,) = requests_of([{"role": "user", "content": "hi"}], 1, {})
    assert (text.text, list(tokens.tokens.ids), chat.chat.messages[0].content) == ("hi", [4, 5], "hi")
    assert text.request_id != tokens.request_id


def test_what_is_not_given_is_left_to_the_cluster() -> None:
    (request,) = requests_of("hi", 1, {"temperature": 0.0, "stop": "x"})
    assert [field.name for field, _ in request.sampling.ListFields()] == ["temperature", "stop"]
    assert list(request.sampling.stop) == ["x"]


def test_several_answers_have_the_ids_and_seeds_that_a_router_gives() -> None:
    requests = requests_of("hi", 3, {"seed": 7, "request_id": "r"})
    routers = sub_requests([Request("r", (1,), SamplingParams(seed=7, max_tokens=1))], 3)
    assert [(r.request_id, r.sampling.seed) for r in requests] == [(r.request_id, r.sampling.seed) for r in routers]


def test_hints_are_metadata() -> None:
    hints = {"tenant": "t", "session": "s", "priority": -3, "ttft_timeout_s": 0.5, "retention": "1h", "next_turn_s": 9}
    assert dict(metadata_of(hints)) == {  # type: ignore[arg-type]
        "x-tenant": "t",
        "x-session-id": "s",
        "x-priority": "-3",
        "x-cache-retention": "1h",
        "x-ttft-timeout-ms": "500",
        "x-next-turn-ms": "9000",
    }


@pytest.mark.parametrize(
    ("field", "prompt", "n", "options"),
    [
        ("n", "x", 0, {}),
        ("n", "x", 129, {}),
        ("top_p0", "x", 1, {"top_p0": 1.0}),
        ("max_tokens", "x", 1, {"max_tokens": -1}),
        ("seed", "x", 1, {"seed": 2**64}),
        ("ids", [2**32], 1, {}),
        ("content", [{"role": "user", "content": 3}], 1, {}),
        ("content", [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], 1, {}),
        ("text", [{"role": "user", "text": "hi"}], 1, {}),
        ("tool_call_id", [{"role": "tool", "content": "4", "tool_call_id": "c"}], 1, {}),
        ("stop", "x", 1, {"stop": 3}),
        ("model", "x", 1, {"model": ["m"]}),
        ("max_tokens", "x", 1, {"max_tokens": 1.5}),
        ("request_id", "x", 1, {"request_id": 5}),
    ],
)
def test_what_cannot_be_sent_is_named(field, prompt, n, options) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests_of(prompt, n, options)
    assert caught.value.field == field


def test_numbers_of_numpy_are_sent() -> None:
    options = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "stop_token_ids": np.array([7])}
    (request,) = requests_of(np.array([4, 5]), 1, options)  # type: ignore[arg-type]
    sampling = request.sampling
    assert (list(request.tokens.ids), sampling.max_tokens, sampling.temperature) == ([4, 5], 3, 0.5)
    assert list(sampling.stop_token_ids) == [7]


def test_fields_of_a_message_that_are_none_are_not_sent() -> None:
    (request,) = requests_of([{"role": "assistant", "content": "hi", "tool_calls": None}], 1, {})  # type: ignore[list-item]
    assert request.chat.messages[0].content == "hi"


def test_a_time_without_end_is_no_deadline() -> None:
    assert [deadline_of(time_s) for time_s in (None, math.inf, 1e12)] == [None] * 3
    assert deadline_of(np.float32(1.5)) == 1.5
    for wrong in (math.nan, "5"):
        with pytest.raises(InvalidRequest) as caught:
            TandemClient(["a:1"]).stream("x", timeout_s=wrong)
        assert caught.value.field == "timeout_s"


def test_metadata_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(InvalidRequest, match="x-tenant"):
        metadata_of({"tenant": "ü"})


def test_the_client_needs_neither_torch_nor_the_services() -> None:
    code = (
        "import sys, tandem; print([m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'services', 'numpy', 'pydantic', 'redis', 'ucxx', 'opentelemetry', 'loadtest')])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("field", "n", "answer"), [("n", 2, Answer("r")), ("resume", 1, Answer(finish_reason="stop"))])
def test_an_answer_that_cannot_go_on_is_named(field, n, answer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests_of("x", n, {}, answer)
    assert caught.value.field == field
