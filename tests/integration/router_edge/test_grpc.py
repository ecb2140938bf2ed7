"""The gRPC API with a real client."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from services.router.dispatch.request import FinishReason
from shared.engine.sampling_params import Speculation
from shared.errors import Overloaded, TandemError, WorkerLost
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.unit.router.edge.scripted_core import MODEL, text_steps

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
GenerateCall = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


def text_request(
    text: str = "hi", sampling: types_pb2.SamplingParams | None = None, **fields: str
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, sampling=sampling, **fields)  # type: ignore[arg-type]


async def failure(call: GenerateCall) -> tuple[grpc.StatusCode, TandemError]:
    """How a call failed: the status, and the typed error of its trailer."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in call]
    return caught.value.code(), from_rpc_error(caught.value, "router")


async def test_an_answer_streams_and_ends_with_usage_and_timings(edge: Edge) -> None:
    edge.says("Hello 🎉", finish=FinishReason.STOP)
    call = edge.grpc.Generate(text_request(request_id="mine", model=MODEL))
    responses = [response async for response in call]
    assert "".join(response.text for response in responses) == "Hello 🎉"
    assert {response.request_id for response in responses} == {"mine"}
    tokens = [token for response in responses for token in response.token_ids]
    assert tokens == [*edge.tokenizer.encode("Hello 🎉", False), edge.tokenizer.eos_token_id]
    assert [r.finish_reason for r in responses[:-1]] == [0] * (len(responses) - 1)
    last = responses[-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_STOP
    assert last.usage.num_output_tokens == len(tokens)
    assert last.usage.num_prompt_tokens == edge.core.requests[0].num_prompt_tokens
    assert (last.ttft.ttft_ms, last.prefill_worker, last.decode_worker) == (12.25, "p0", "d0")


async def test_absent_fields_take_defaults_and_present_zeros_do_not(edge: Edge) -> None:
    edge.says("x")
    zeros = types_pb2.SamplingParams(temperature=0, seed=0, logprobs=0, max_tokens=5, stop=["a", "b"])
    for sampling in (None, zeros):
        _ = [r async for r in edge.grpc.Generate(text_request(sampling=sampling))]
    absent, given = (request.sampling for request in edge.core.requests)
    assert (absent.temperature, absent.top_p, absent.logprobs, absent.stop) == (1.0, 1.0, None, ())
    assert absent.max_tokens == 100 - edge.core.requests[0].num_prompt_tokens
    assert (given.temperature, given.seed, given.logprobs, given.max_tokens) == (0, 0, 0, 5)
    assert given.stop == ("a", "b")


async def test_tokens_chat_and_logprobs(edge: Edge) -> None:
    edge.says("xy")
    tokens = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=[4, 5]), sampling=types_pb2.SamplingParams(logprobs=2)
    )
    responses = [r async for r in edge.grpc.Generate(tokens)]
    assert edge.core.requests[0].prompt_token_ids == (4, 5)
    assert all(len(r.logprobs) == len(r.token_ids) for r in responses)
    assert [len(entry.top) for entry in responses[0].logprobs] == [2]
    message = inference_pb2.ChatMessage(role="user", content="hi")
    chat = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=[message]))
    _ = [r async for r in edge.grpc.Generate(chat)]
    prompt = edge.tokenizer.decode(edge.core.requests[1].prompt_token_ids)
    assert prompt == "<user>hi<assistant>"


async def test_a_bad_request_names_its_field(edge: Edge) -> None:
    outside = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[2**31]))
    for request, field in (
        (inference_pb2.GenerateRequest(), "prompt"),
        (text_request(""), "prompt"),
        (outside, "prompt"),
        (text_request(sampling=types_pb2.SamplingParams(top_p=0)), "top_p"),
        (text_request(request_id="x" * 129), "request_id"),
    ):
        code, error = await failure(edge.grpc.Generate(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.field == field


async def test_errors_of_the_core_arrive_typed_before_and_in_mid_stream(edge: Edge) -> None:
    steps = text_steps(edge.tokenizer, "ab cd")
    edge.core.script = lambda request: [Overloaded("full", retry_after_s=2.5)]
    code, error = await failure(edge.grpc.Generate(text_request()))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.5
    edge.core.script = lambda request: [*steps[:1], WorkerLost("gone")]
    code, error = await failure(edge.grpc.Generate(text_request()))
    assert (code, type(error)) == (grpc.StatusCode.UNAVAILABLE, WorkerLost)
    edge.core.script = lambda request: [*steps[:1], ZeroDivisionError("secret")]
    code, error = await failure(edge.grpc.Generate(text_request()))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in error.message
    code, _ = await failure(edge.grpc.Generate(text_request(model="gpt-9")))
    assert code is grpc.StatusCode.NOT_FOUND
    assert all(running.closed.is_set() for running in edge.core.running)


async def test_a_cancelled_call_frees_the_request(edge: Edge) -> None:
    edge.core.script = lambda request: [*text_steps(edge.tokenizer, "ab cd")[:1], asyncio.Event()]
    call = edge.grpc.Generate(text_request())
    first = await call.read()
    assert isinstance(first, inference_pb2.GenerateResponse)
    assert first.text
    call.cancel()
    await edge.closed()


async def test_the_clients_deadline_is_the_requests_and_frees_it(edge: Edge) -> None:
    edge.core.script = lambda request: [asyncio.Event()]
    await edge.channel.channel_ready()
    code, _ = await failure(edge.grpc.Generate(text_request(), timeout=3.0))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await edge.closed()
    assert 0 < edge.core.requests[0].timeout_s < 4  # on the wire it is rounded up


async def test_status_and_keys(start_edge: StartEdge) -> None:
    edge = await start_edge(api_keys=("k1",))
    edge.says("x")
    for metadata in (None, (("authorization", "Bearer k2"),)):
        code, _ = await failure(edge.grpc.Generate(text_request(), metadata=metadata))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError):
            await edge.grpc.GetStatus(inference_pb2.GetStatusRequest(), metadata=metadata)
    known = (("authorization", "Bearer k1"), ("traceparent", TRACEPARENT))
    assert [r async for r in edge.grpc.Generate(text_request(), metadata=known)]
    assert edge.core.requests[0].trace.traceparent == TRACEPARENT
    status = await edge.grpc.GetStatus(inference_pb2.GetStatusRequest(), metadata=known)
    assert status.router_name == "router-0"


async def test_a_batch_answers_each_request_under_its_index(edge: Edge) -> None:
    edge.says("ab cd")
    batch = inference_pb2.GenerateBatchRequest(requests=[text_request("one"), text_request("two", request_id="mine")])
    texts, starts = ["", ""], [0, 0]
    async for part in edge.grpc.GenerateBatch(batch):
        texts[part.index] += part.response.text
        starts[part.index] += part.response.HasField("start")
    assert (texts, starts) == (["ab cd", "ab cd"], [1, 1])
    prompts = [edge.tokenizer.decode(request.prompt_token_ids) for request in edge.core.requests]
    assert prompts == ["one", "two"]
    assert edge.core.requests[1].request_id == "mine"


async def test_a_batch_is_checked_as_a_whole_before_any_of_it_starts(edge: Edge) -> None:
    twice = [text_request(request_id="a"), text_request(request_id="a")]
    resumed = text_request()
    resumed.resume.SetInParent()
    for requests, field in (
        ([], "requests"),
        (twice, "requests"),
        ([text_request()] * 129, "requests"),
        ([resumed], "requests"),
        ([text_request(), text_request("")], "prompt"),
    ):
        code, error = await failure(edge.grpc.GenerateBatch(inference_pb2.GenerateBatchRequest(requests=requests)))
        assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert not edge.core.requests


async def test_tokens_models_and_requests(edge: Edge) -> None:
    tokens = await edge.grpc.Tokenize(inference_pb2.TokenizeRequest(text="hi"))
    assert list(tokens.token_ids) == edge.tokenizer.encode("hi")
    assert tokens.max_model_len == 100
    bare = await edge.grpc.Tokenize(inference_pb2.TokenizeRequest(text="hi", add_special_tokens=False))
    assert list(bare.token_ids) == list(tokens.token_ids)[1:]
    text = await edge.grpc.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == "<|bos|>hi"
    (model,) = (await edge.grpc.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.id, model.max_model_len) == (MODEL, 100)
    assert (await edge.grpc.GetRequest(inference_pb2.GetRequestRequest(request_id="r"))).state == "decoding"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await edge.grpc.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[2**31]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_biases_bad_words_and_structures_reach_the_core(edge: Edge) -> None:
    edge.says("x")
    sampling = types_pb2.SamplingParams(logit_bias={7: -1.5}, bad_words=["no"])
    sampling.structured_output.choice.values.append("yes")
    sampling.speculation.max = 3
    _ = [r async for r in edge.grpc.Generate(text_request(sampling=sampling))]
    got = edge.core.requests[0].sampling
    assert got.logit_bias == ((7, -1.5),)
    assert tuple(edge.tokenizer.encode("no", add_special_tokens=False)) in got.bad_sequences
    assert got.structured_output is not None
    assert got.speculation == Speculation("auto", 3)
    code, error = await failure(
        edge.grpc.Generate(text_request(sampling=types_pb2.SamplingParams(logit_bias={2**31: 1})))
    )
    assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "logit_bias")
