"""A stream that broke continues over both APIs: exactly, and with its start's seed and limits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.router.dispatch.request import FinishReason
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from shared.seeds import SAMPLER_VERSION
from tests.integration.router_edge.conftest import Edge
from tests.integration.router_edge.test_grpc import failure, text_request
from tests.integration.router_edge.test_http import CHAT, COMPLETIONS, events
from tests.unit.router.edge.scripted_core import text_steps
from tests.waiting import DEADLINE_S

ANSWER = "one 🎉 two ST three STOP"
SAMPLING = {"seed": 2**53 + 1, "max_tokens": 60, "stop": ["STOP"], "temperature": 0.5}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def says_the_rest(edge: Edge) -> None:
    """Every request is answered with what follows the tokens that its client has."""

    def script(request):
        steps = text_steps(edge.tokenizer, ANSWER, FinishReason.STOP, logprobs=request.sampling.logprobs)
        return steps[len(request.resumed_token_ids) :]

    edge.core.script = script


async def test_a_grpc_answer_begins_with_what_it_takes_to_resume_it(edge: Edge) -> None:
    says_the_rest(edge)
    responses = [r async for r in edge.grpc.Generate(text_request(), timeout=DEADLINE_S)]
    (request,) = edge.core.requests
    start = responses[0].start
    assert (start.seed, start.max_tokens) == (request.sampling.seed, request.sampling.max_tokens)
    assert start.sampler_version == SAMPLER_VERSION
    assert 0 < start.timeout_s <= DEADLINE_S + 1  # on the wire it is rounded up, above 100 s to whole seconds
    assert not any(response.HasField("start") for response in responses[1:])


async def test_a_grpc_answer_goes_on_behind_every_cut(edge: Edge) -> None:
    says_the_rest(edge)
    sampling = types_pb2.SamplingParams(**SAMPLING, logprobs=1)
    whole = [r async for r in edge.grpc.Generate(text_request(sampling=sampling))]
    assert "".join(r.text for r in whole) == ANSWER.removesuffix("STOP")
    for cut in range(len(whole)):
        had = whole[:cut]
        resume = inference_pb2.Resume(
            token_ids=[t for r in had for t in r.token_ids],
            num_chars=len("".join(r.text for r in had)),
            sampler_version=SAMPLER_VERSION,
        )
        rest = [r async for r in edge.grpc.Generate(text_request(sampling=sampling, resume=resume))]  # type: ignore[arg-type]
        both = (*had, *rest)
        assert "".join(r.text for r in both) == "".join(r.text for r in whole)
        assert [t for r in both for t in r.token_ids] == [t for r in whole for t in r.token_ids]
        assert [e for r in both for e in r.logprobs] == [e for r in whole for e in r.logprobs]
        assert rest[-1].usage.num_output_tokens == whole[-1].usage.num_output_tokens
        assert rest[0].start.seed == SAMPLING["seed"]


async def test_a_state_that_cannot_be_is_refused_by_name(edge: Edge) -> None:
    says_the_rest(edge)
    resume = inference_pb2.Resume(token_ids=[4])
    code, error = await failure(edge.grpc.Generate(text_request(resume=resume)))  # type: ignore[arg-type]
    assert (code.name, error.field) == ("INVALID_ARGUMENT", "seed")
    other = text_request(resume=resume, sampling=types_pb2.SamplingParams(**SAMPLING))  # type: ignore[arg-type]
    code, error = await failure(edge.grpc.Generate(other))
    assert (code.name, error.field) == ("INVALID_ARGUMENT", "resume.sampler_version")
    first = {"token_ids": [4], "seed": 5}
    for body, field in (
        ({"stream": True, "resume": {"choices": [first]}}, "resume.sampler_version"),
        ({"stream": True, "resume": {"choices": [{**first, "sampler_version": 3}]}}, "resume.sampler_version"),
        ({"resume": {"choices": [{}]}}, "resume"),
        ({"stream": True, "resume": {"choices": [{}, {}]}}, "resume.choices"),
        ({"stream": True, "resume": {"choices": [{"token_ids": [4]}]}}, "seed"),
        ({"stream": True, "resume": {"choices": [{"tokens": [4]}]}}, "resume"),
    ):
        answer = await edge.client.post(COMPLETIONS, json={"prompt": "hi", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), body


def choices_of(chunks: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """What a client keeps of each choice."""
    kept: list[dict[str, Any]] = [
        {
            "text": "",
            "token_ids": [],
            "logprobs": [],
            "seed": None,
            "sampler_version": None,
            "finish_reason": None,
        }
        for _ in range(n)
    ]
    for chunk in chunks:
        for choice in chunk["choices"]:
            mine = kept[choice["index"]]
            if start := chunk.get("tandem", {}).get("start"):
                mine["seed"], mine["sampler_version"] = start["seed"], start["sampler_version"]
            mine["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            mine["token_ids"] += choice.get("token_ids", [])
            if logprobs := choice["logprobs"]:
                mine["logprobs"] += logprobs.get("text_offset") or logprobs.get("content")
            mine["finish_reason"] = choice["finish_reason"]
    return kept


def joined(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **{name: a[name] + b[name] for name in ("text", "token_ids", "logprobs")},
            "seed": a["seed"] or b["seed"],
            "sampler_version": a["sampler_version"] or b["sampler_version"],
            "finish_reason": b["finish_reason"] or a["finish_reason"],
        }
        for a, b in zip(first, second, strict=True)
    ]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETIONS, {"prompt": "hi", "logprobs": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}),
    ],
)
async def test_http_answers_go_on_behind_every_cut(edge: Edge, path: str, asked: dict[str, Any]) -> None:
    says_the_rest(edge)
    body = {**asked, **SAMPLING, "n": 2, "stream": True, "return_token_ids": True, "stream_options": USAGE}
    whole = [json.loads(event) for event in events((await edge.client.post(path, json=body)).text)[:-1]]
    expected = choices_of(whole, 2)
    assert [choice["text"] for choice in expected] == [ANSWER.removesuffix("STOP")] * 2
    assert expected[0]["seed"] == SAMPLING["seed"] != expected[1]["seed"]
    for cut in range(1, len(whole)):
        had = choices_of(whole[:cut], 2)
        state = [
            {
                "token_ids": choice["token_ids"],
                "num_chars": len(choice["text"]),
                **{
                    name: choice[name]
                    for name in ("seed", "sampler_version", "finish_reason")
                    if choice[name] is not None
                },
            }
            for choice in had
        ]
        answer = await edge.client.post(path, json={**body, "resume": {"choices": state}})
        assert answer.status_code == 200, answer.text
        rest = [json.loads(event) for event in events(answer.text)[:-1]]
        assert joined(had, choices_of(rest, 2)) == expected
        assert rest[-1]["usage"]["completion_tokens"] == whole[-1]["usage"]["completion_tokens"]
        assert rest[-1]["usage"]["prompt_tokens"] == whole[-1]["usage"]["prompt_tokens"]
    assert {request.request_id[-2:] for request in edge.core.requests} == {"-0", "-1"}
