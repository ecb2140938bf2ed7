"""What a caller asks for, as messages; and what the client package needs to be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.router.dispatch.request import Request
from services.router.edge.http.endpoint import sub_requests
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest
from tandem import Answer
from tandem.options import metadata_of, requests_of


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
    assert dict(metadata_of({"tenant": "t", "session": "s", "priority": -3, "ttft_timeout_s": 0.5})) == {
        "x-tenant": "t",
        "x-session-id": "s",
        "x-priority": "-3",
        "x-ttft-timeout-ms": "500",
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
    ],
)
def test_what_cannot_be_sent_is_named(field, prompt, n, options) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests_of(prompt, n, options)
    assert caught.value.field == field


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
