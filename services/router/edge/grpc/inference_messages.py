"""Between the messages of `InferenceService` and the edge's own types."""

from __future__ import annotations

from typing import Any

import grpc.aio

from services.router.dispatch.request import Request, Resume
from services.router.edge.output_stream import OutputDelta, OutputFinish
from services.router.edge.text.generation_defaults import GenerationDefaults
from services.router.edge.text.prompt_tokenizer import MAX_BAD_WORDS, ChatPrompt, Prompt, TextPrompt, TokensPrompt
from services.router.views.timings import system_fingerprint_of, ttft_message
from shared.engine.sampling_params import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams
from shared.errors import InvalidRequest
from shared.rpc.convert import finish_reason_to_proto, speculation_from_proto, structure_from_proto
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from shared.seeds import SAMPLER_VERSION

Context = grpc.aio.ServicerContext[Any, Any]

_MAX_LIST_LEN = {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_STOP_TOKEN_IDS, "bad_words": MAX_BAD_WORDS}

_OWN_FORMS = ("logit_bias", "bad_words", "bad_sequences", "structured_output", "speculation")
"""Sampling fields that are no plain values."""


def sampling_params(message: types_pb2.SamplingParams, defaults: GenerationDefaults) -> SamplingParams:
    """The wire's sampling fields, absent ones at their defaults; raises InvalidRequest naming the field."""
    given: dict[str, Any] = dict(defaults.given)
    for field, value in message.ListFields():
        name = field.name  # a descriptor makes a new string each time
        limit = _MAX_LIST_LEN.get(name)
        if limit is not None and len(value) > limit:
            raise InvalidRequest(f"{name} has more than {limit} entries", field=name, limit=limit)
        if name in _OWN_FORMS:
            continue
        given[name] = tuple(value) if name in ("stop", "stop_token_ids") else value
    given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if message.bad_sequences:
        raise InvalidRequest("bad_sequences is between router and workers: send bad_words", field="bad_sequences")
    for between in ("pooling", "beams"):
        if between in given:
            raise InvalidRequest(f"{between} is between router and workers", field=between)
    if message.HasField("structured_output"):
        given["structured_output"] = structure_from_proto(message.structured_output)
    if message.HasField("speculation"):
        given["speculation"] = speculation_from_proto(message.speculation)
    return SamplingParams(**given)


def metadata_of(context: Context) -> dict[str, str]:
    """The call's metadata that is text."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def prompt_of(request: inference_pb2.GenerateRequest, max_messages: int) -> Prompt:
    """The prompt; raises InvalidRequest where there is none. Of more messages than `max_messages` one too many is
    taken: enough to refuse them."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "tokens":
        return TokensPrompt(request.tokens.ids)
    if kind == "chat":
        return ChatPrompt([{"role": m.role, "content": m.content} for m in request.chat.messages[: max_messages + 1]])
    raise InvalidRequest("prompt is missing: set text, tokens or chat", field="prompt")


def resume_of(message: inference_pb2.Resume) -> Resume:
    """The part of an interrupted answer that the client already has, from its message."""
    return Resume(
        tuple(message.token_ids),
        message.num_chars if message.HasField("num_chars") else None,
        sampler_version=message.sampler_version,
    )


def start_of(request: Request, router_name: str) -> inference_pb2.Start:
    """The fields with which a client can continue a prepared request's answer on another router."""
    seed, max_tokens = request.sampling.seed, request.sampling.max_tokens
    assert seed is not None, "the input processor resolves it"
    assert max_tokens is not None, "likewise"
    return inference_pb2.Start(
        seed=seed,
        max_tokens=max_tokens,
        timeout_s=request.timeout_s,
        router=router_name,
        sampler_version=SAMPLER_VERSION,
    )


def response_of(
    request_id: str, delta: OutputDelta, start: inference_pb2.Start | None
) -> inference_pb2.GenerateResponse:
    """A delta as a message."""
    response = inference_pb2.GenerateResponse(
        request_id=request_id, text=delta.text, token_ids=delta.token_ids, start=start
    )
    for entry in delta.logprobs:
        response.logprobs.add(
            logprob=entry.logprob,
            top=[types_pb2.TokenLogprob(token_id=t, logprob=value) for t, value in entry.top],
        )
    for entry in delta.prompt_logprobs:
        response.prompt_logprobs.add(
            logprob=entry.logprob,
            top=[types_pb2.TokenLogprob(token_id=t, logprob=value) for t, value in entry.top],
        )
    if delta.finish is not None:
        _add_finish(response, delta.finish)
    return response


def _add_finish(response: inference_pb2.GenerateResponse, finish: OutputFinish) -> None:
    response.finish_reason = finish_reason_to_proto(finish.reason)
    usage, counts = response.usage, finish.usage
    usage.num_prompt_tokens = counts.num_prompt_tokens
    usage.num_output_tokens = counts.num_output_tokens
    usage.num_cached_tokens = counts.num_cached_tokens
    usage.num_guessed_tokens, usage.num_accepted_tokens = counts.num_guessed_tokens, counts.num_accepted_tokens
    response.ttft.CopyFrom(ttft_message(finish.record))
    response.prefill_worker = finish.record.prefill_worker
    response.decode_worker = finish.record.decode_worker
    response.system_fingerprint = system_fingerprint_of(finish.record)
