"""`tandem.v1.InferenceService`: what clients call over gRPC."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import grpc.aio

from services.router.edge.auth import ApiKeys
from services.router.edge.bad_words import MAX_BAD_WORDS
from services.router.edge.generation_defaults import GenerationDefaults
from services.router.edge.input_processor import (
    CallInfo,
    ChatPrompt,
    InputProcessor,
    Prompt,
    PromptOptions,
    TextPrompt,
    TokensPrompt,
)
from services.router.edge.limits import LimitSettings
from services.router.edge.output_processor import OutputDelta, OutputFinish
from services.router.edge.scheduling import scheduling_hints
from services.router.edge.settings import EdgeSettings
from services.router.edge.unary_call import answer_client
from services.router.edge.write_watch import WriteWatch
from services.router.request import Request, RequestSummary, Resume
from shared.engine.sampling_params import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams
from shared.errors import DeadlineExceeded, Internal, InvalidRequest, TandemError
from shared.rpc.convert import finish_reason_to_proto, structure_from_proto
from shared.rpc.errors import abort
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from shared.telemetry.logs import request_log

logger = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.InferenceService"

Context = grpc.aio.ServicerContext[Any, Any]

_MAX_LIST_LEN = {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_STOP_TOKEN_IDS, "bad_words": MAX_BAD_WORDS}

_OWN_FORMS = ("logit_bias", "bad_words", "bad_sequences", "structured_output")
"""Sampling fields that are no plain values."""

_TRACE_KEYS = ("traceparent", "tracestate")


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves `Generate` and `GetStatus`; a call that its client ends frees everything in the cluster."""

    def __init__(
        self,
        input_processor: InputProcessor,
        settings: EdgeSettings,
        status: Callable[[], inference_pb2.ClusterStatus],
        explain: Callable[[str], inference_pb2.Explanation],
        router_name: str = "",
    ) -> None:
        """`explain` raises NotFound for a request that it does not know."""
        self._router_name = router_name
        self._explain = explain
        self._input_processor = input_processor
        self._keys = ApiKeys.of(settings)
        self._status = status
        self._write_timeout_s = settings.limits.write_timeout_s

    def register(self, server: grpc.aio.Server) -> None:
        """What `RpcServer` takes as `register`."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Generate(  # type: ignore[override]  # noqa: N802  # writes by hand: see `_generate`
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Streams one answer; errors become a status with the typed error as trailer."""
        arrived_at = time.perf_counter()
        error: TandemError
        try:
            await self._generate(request, context, arrived_at)
            return
        except TandemError as known:
            error = known
        except Exception as unknown:
            log = request_log(logger, request.request_id, _trace(_metadata(context)))
            log.exception("request %s failed", request.request_id)
            error = Internal(f"internal error ({type(unknown).__name__})")
        await abort(context, error)

    async def GetStatus(  # noqa: N802
        self, request: inference_pb2.GetStatusRequest, context: Context
    ) -> inference_pb2.ClusterStatus:
        """The cluster as this router sees it."""
        return await answer_client(self._keys.check, self._get_status, request, context)

    async def Explain(  # noqa: N802
        self, request: inference_pb2.ExplainRequest, context: Context
    ) -> inference_pb2.Explanation:
        """Why a request went where it went."""
        return await answer_client(self._keys.check, self._explained, request, context)

    async def _get_status(self, _request: inference_pb2.GetStatusRequest) -> inference_pb2.ClusterStatus:
        return self._status()

    async def _explained(self, request: inference_pb2.ExplainRequest) -> inference_pb2.Explanation:
        return self._explain(request.request_id)

    async def _generate(self, request: inference_pb2.GenerateRequest, context: Context, arrived_at: float) -> None:
        """One coroutine, no generator: a cancelled call unwinds all of it at once."""
        metadata = _metadata(context)
        tenant = self._keys.check(metadata.get("authorization"))
        hints = scheduling_hints(metadata, tenant)
        account = self._input_processor.rates.begin(
            self._keys.account(metadata.get("authorization"), hints.tenant), hints.tenant
        )
        time_left = context.time_remaining()
        if time_left is not None and time_left <= 0:
            raise DeadlineExceeded("the call's deadline passed before it began")
        info = CallInfo(
            model=request.model,
            request_id=request.request_id,
            arrived_at=arrived_at,
            timeout_s=time_left or 0.0,
            trace=_trace(metadata),
            scheduling=hints,
            cache_salt=request.cache_salt,
        )
        prompt = _prompt(request, self._input_processor.core.max_prompt_tokens())
        prepared = await self._input_processor.prepare(
            prompt,
            sampling_params(request.sampling, self._input_processor.defaults),
            info,
            options=PromptOptions(bad_words=tuple(request.sampling.bad_words)),
        )
        if request.HasField("resume"):
            seed = request.sampling.seed if request.sampling.HasField("seed") else None
            prepared = await self._input_processor.resumed(prepared, _resume(request.resume), seed)
        account.charge(prepared.num_input_tokens)
        start: inference_pb2.Start | None = _start(prepared, self._router_name)
        async with WriteWatch(self._write_timeout_s) as watch, self._input_processor.start([prepared]) as outputs:
            try:
                async for _, delta in outputs:
                    watch.begin()
                    await context.write(_response(prepared.request_id, delta, start))
                    start = None
                    watch.end()
            finally:
                account.charge(outputs.num_output_tokens)


def sampling_params(message: types_pb2.SamplingParams, defaults: GenerationDefaults) -> SamplingParams:
    """The wire's sampling fields, absent ones at their defaults; raises InvalidRequest naming the field."""
    given: dict[str, Any] = dict(defaults.given)
    for field, value in message.ListFields():
        limit = _MAX_LIST_LEN.get(field.name)
        if limit is not None and len(value) > limit:
            raise InvalidRequest(f"{field.name} has more than {limit} entries", field=field.name, limit=limit)
        if field.name in _OWN_FORMS:
            continue
        given[field.name] = tuple(value) if field.name in ("stop", "stop_token_ids") else value
    given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if message.bad_sequences:
        raise InvalidRequest("bad_sequences is between router and workers: send bad_words", field="bad_sequences")
    if message.HasField("structured_output"):
        given["structured_output"] = structure_from_proto(message.structured_output)
    return SamplingParams(**given)


def _trace(metadata: dict[str, str]) -> dict[str, str]:
    """The call's W3C trace context."""
    return {key: metadata[key] for key in _TRACE_KEYS if key in metadata}


def _metadata(context: Context) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def server_options(limits: LimitSettings) -> tuple[tuple[str, int], ...]:
    """gRPC's own options that bound what a client may send and hold."""
    return (
        ("grpc.max_receive_message_length", limits.max_grpc_message_bytes),
        ("grpc.max_concurrent_streams", limits.max_grpc_streams),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
    )


def _prompt(request: inference_pb2.GenerateRequest, max_messages: int) -> Prompt:
    """Of more messages than `max_messages` one too many is taken: enough to refuse them."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "tokens":
        return TokensPrompt(request.tokens.ids)
    if kind == "chat":
        return ChatPrompt([{"role": m.role, "content": m.content} for m in request.chat.messages[: max_messages + 1]])
    raise InvalidRequest("prompt is missing: set text, tokens or chat", field="prompt")


def _resume(message: inference_pb2.Resume) -> Resume:
    return Resume(tuple(message.token_ids), message.num_chars if message.HasField("num_chars") else None)


def _start(request: Request, router_name: str) -> inference_pb2.Start:
    seed, max_tokens = request.sampling.seed, request.sampling.max_tokens
    assert seed is not None, "the input processor resolves it"
    assert max_tokens is not None, "likewise"
    return inference_pb2.Start(
        seed=seed,
        max_tokens=max_tokens,
        timeout_s=request.timeout_s,
        router=router_name,
    )


def _response(request_id: str, delta: OutputDelta, start: inference_pb2.Start | None) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=request_id, text=delta.text, token_ids=delta.token_ids, start=start
    )
    for entry in delta.logprobs:
        response.logprobs.add(
            logprob=entry.logprob,
            top=[types_pb2.TokenLogprob(token_id=t, logprob=value) for t, value in entry.top],
        )
    if delta.finish is not None:
        _add_finish(response, delta.finish)
    return response


def _add_finish(response: inference_pb2.GenerateResponse, finish: OutputFinish) -> None:
    response.finish_reason = finish_reason_to_proto(finish.reason)
    response.usage.num_prompt_tokens = finish.usage.num_prompt_tokens
    response.usage.num_output_tokens = finish.usage.num_output_tokens
    response.usage.num_cached_tokens = finish.usage.num_cached_tokens
    response.ttft.CopyFrom(_ttft(finish.summary))
    response.prefill_worker = finish.summary.prefill_worker
    response.decode_worker = finish.summary.decode_worker


def _ttft(summary: RequestSummary) -> types_pb2.TtftSplit:
    split = summary.ttft
    return types_pb2.TtftSplit(
        queue_ms=split.queue_ms,
        placement_ms=split.placement_ms,
        reserve_ms=split.reserve_ms,
        prefix_fetch_ms=split.prefix_fetch_ms,
        prefill_queue_ms=split.prefill_queue_ms,
        prefill_compute_ms=split.prefill_compute_ms,
        return_ms=split.return_ms,
        ttft_ms=split.ttft_ms,
        ship_exposed_ms=split.ship_exposed_ms,
        first_decode_step_ms=split.first_decode_step_ms,
    )
