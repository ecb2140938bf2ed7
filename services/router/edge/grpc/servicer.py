"""`tandem.v1.InferenceService`: what clients call over gRPC."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import grpc.aio

from services.router.dispatch.request import Request
from services.router.edge.access import Access
from services.router.edge.catalog import Catalog
from services.router.edge.grpc.inference_messages import (
    Context,
    metadata_of,
    prompt_of,
    response_of,
    resume_of,
    sampling_params,
    start_of,
)
from services.router.edge.grpc.unary_call import answer_client
from services.router.edge.grpc.write_watch import WriteWatch
from services.router.edge.input_processor import CallInfo, InputProcessor, PromptOptions
from services.router.edge.limits import LimitSettings
from services.router.edge.request_ledger import CallEntry
from services.router.edge.scheduling import scheduling_hints
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.edge.text.prompt_tokenizer import TextPrompt
from services.router.views.traces.call_trace import CallTrace
from shared.errors import Cancelled, DeadlineExceeded, Internal, InvalidRequest, TandemError
from shared.rpc.errors import abort
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from shared.telemetry.logs import request_log

logger = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.InferenceService"

Write = Callable[[int, inference_pb2.GenerateResponse], Awaitable[None]]
"""Passes a message of the request of that index on to the client, in the call's own form."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """What clients call; a call that its client ends frees everything in the cluster."""

    def __init__(
        self,
        input_processor: InputProcessor,
        catalog: Catalog,
        settings: EdgeSettings,
        status: Callable[[float], inference_pb2.ClusterStatus],
        explain: Callable[[str, str], inference_pb2.Explanation],
        request_info: Callable[[str, str], inference_pb2.RequestInfo],
        router_name: str = "",
        access: Access | None = None,
    ) -> None:
        """Serves the model of `input_processor`, which is one of `catalog`. `explain` and `request_info` get an id and
        the tenant that asks (empty: it may see all); they raise NotFound for a request that they do not know, or that
        is another tenant's. `access` counts and logs the calls."""
        self._access = access or Access()
        self._router_name = router_name
        self._explain = explain
        self._request_info = request_info
        self._max_choices = settings.max_choices
        self._input_processor = input_processor
        self._catalog = catalog
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
        await self._stream("Generate", [request], context, lambda _index, response: context.write(response))

    async def GenerateBatch(  # type: ignore[override]  # noqa: N802  # as above
        self, request: inference_pb2.GenerateBatchRequest, context: Context
    ) -> None:
        """Streams several answers, mixed as they come; errors likewise."""

        def write(index: int, response: inference_pb2.GenerateResponse) -> Awaitable[None]:
            return context.write(inference_pb2.GenerateBatchResponse(index=index, response=response))

        await self._stream("GenerateBatch", request.requests, context, write)

    async def Warm(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.Warmed:
        """Computes a prompt; one token is sampled behind it, and dropped."""
        usage, asked = types_pb2.Usage(), inference_pb2.GenerateRequest()
        asked.CopyFrom(request)
        asked.sampling.Clear()
        asked.sampling.max_tokens, asked.sampling.temperature, asked.sampling.ignore_eos = 1, 0.0, True

        async def keep(_index: int, response: inference_pb2.GenerateResponse) -> None:
            usage.CopyFrom(response.usage)

        await self._stream("Warm", [asked], context, keep)
        return inference_pb2.Warmed(
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            retained_s=scheduling_hints(metadata_of(context)).retain_s,
        )

    async def CloseSession(  # noqa: N802
        self, request: inference_pb2.CloseSessionRequest, context: Context
    ) -> inference_pb2.ClosedSession:
        """Retains nothing for a session of the caller's tenant any more."""

        async def close(asked: inference_pb2.CloseSessionRequest) -> inference_pb2.ClosedSession:
            num_blocks = await self._input_processor.close_session(*self._session(asked, context))
            return inference_pb2.ClosedSession(num_blocks=num_blocks)

        return await answer_client(self._keys.check, close, request, context)

    async def ExpectSession(  # noqa: N802
        self, request: inference_pb2.ExpectSessionRequest, context: Context
    ) -> inference_pb2.ExpectedSession:
        """When a session of the caller's tenant comes back."""

        async def expect(asked: inference_pb2.ExpectSessionRequest) -> inference_pb2.ExpectedSession:
            named = self._session(asked, context)
            if not asked.HasField("next_turn_s"):
                raise InvalidRequest("next_turn_s is missing", field="next_turn_s")
            self._input_processor.expect_session(*named, asked.next_turn_s)
            return inference_pb2.ExpectedSession()

        return await answer_client(self._keys.check, expect, request, context)

    def _session(
        self, asked: inference_pb2.CloseSessionRequest | inference_pb2.ExpectSessionRequest, context: Context
    ) -> tuple[str, str]:
        """Tenant and session that a call names."""
        metadata = metadata_of(context)
        key = metadata.get("authorization")
        hints = scheduling_hints(metadata, self._keys.check(key))
        self._input_processor.rates.begin(self._keys.account(key, hints.tenant), hints.tenant)
        self._input_processor.check_model(asked.model, hints.tenant)
        session = asked.session or hints.session
        if not session:
            raise InvalidRequest("session is missing, and so is x-session-id", field="session")
        return hints.tenant, session

    async def _stream(
        self,
        method: str,
        requests: Sequence[inference_pb2.GenerateRequest],
        context: Context,
        write: Write,
    ) -> None:
        arrived_at = time.perf_counter()
        metadata = metadata_of(context)
        trace = self._input_processor.traces.begin(
            metadata.get("traceparent", ""), metadata.get("tracestate", ""), arrived_at
        )
        entry = CallEntry(self._input_processor.ledger, arrived_at)
        entry.note.trace_id = trace.trace_id
        error: TandemError | None = None
        try:
            with entry:
                if method == "GenerateBatch":
                    self._check_batch(requests)
                if method == "Warm" and requests[0].HasField("resume"):
                    raise InvalidRequest("resume: nothing is answered that could be continued", field="resume")
                await self._generate(requests, metadata, context, trace, write, entry)
            return
        except TandemError as known:
            error = known
        except Exception as unknown:
            request_id = requests[0].request_id if requests else ""
            request_log(logger, request_id, trace.trace_id).exception("request %s failed", request_id)
            error = Internal(f"internal error ({type(unknown).__name__})")
        except asyncio.CancelledError:
            error = Cancelled("the client ended the call")
            raise
        finally:
            code = "OK" if error is None else error.grpc_code
            self._access.grpc_ended(method, code, time.perf_counter() - arrived_at, entry.note)
            trace.end(error, method, self._input_processor.model_name, entry.note.records)
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
        return await answer_client(self._keys.check, partial(self._explained, context), request, context)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or a conversation."""
        return await answer_client(self._keys.check, partial(self._tokenize, context), request, context)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Text of token ids."""
        return await answer_client(self._keys.check, partial(self._detokenize, context), request, context)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The served models."""
        return await answer_client(self._keys.check, partial(self._list_models, context), request, context)

    async def GetRequest(  # noqa: N802
        self, request: inference_pb2.GetRequestRequest, context: Context
    ) -> inference_pb2.RequestInfo:
        """See `InferenceService`: the state and timings of one request."""
        return await answer_client(self._keys.check, partial(self._get_request, context), request, context)

    async def _get_status(self, request: inference_pb2.GetStatusRequest) -> inference_pb2.ClusterStatus:
        return self._status(request.window_s)

    async def _explained(self, context: Context, request: inference_pb2.ExplainRequest) -> inference_pb2.Explanation:
        return self._explain(request.request_id, self._key_tenant(context))

    async def _get_request(
        self, context: Context, request: inference_pb2.GetRequestRequest
    ) -> inference_pb2.RequestInfo:
        return self._request_info(request.request_id, self._key_tenant(context))

    def _key_tenant(self, context: Context) -> str:
        """The tenant that the call's key speaks for; empty for one of none."""
        return self._keys.check(metadata_of(context).get("authorization"))

    async def _list_models(
        self, context: Context, _request: inference_pb2.ListModelsRequest
    ) -> inference_pb2.ListModelsResponse:
        models = [
            inference_pb2.Model(id=name, max_model_len=model.core.max_prompt_tokens())
            for name, model in self._catalog.entries()
        ]
        adapters = [
            inference_pb2.Model(
                id=adapter.name,
                max_model_len=model.core.max_prompt_tokens(),
                parent=model.model_name,
                adapter=adapter.digest,
            )
            for adapter, model in self._catalog.adapters(self._tenant(context))
        ]
        return inference_pb2.ListModelsResponse(models=models + adapters)

    async def _tokenize(
        self, context: Context, request: inference_pb2.TokenizeRequest
    ) -> inference_pb2.TokenizeResponse:
        processor = self._input_processor
        processor.check_model(request.model, self._tenant(context))
        max_len = processor.core.max_prompt_tokens()
        asked = inference_pb2.GenerateRequest()
        if request.WhichOneof("prompt") == "chat":
            asked.chat.CopyFrom(request.chat)
        elif request.WhichOneof("prompt") == "text":
            asked.text = request.text
        prompt = prompt_of(asked, max_len)
        if isinstance(prompt, TextPrompt) and request.HasField("add_special_tokens"):
            prompt = replace(prompt, add_special_tokens=request.add_special_tokens)
        token_ids = await processor.token_ids(prompt)
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=max_len)

    async def _detokenize(
        self, context: Context, request: inference_pb2.DetokenizeRequest
    ) -> inference_pb2.DetokenizeResponse:
        self._input_processor.check_model(request.model, self._tenant(context))
        return inference_pb2.DetokenizeResponse(text=self._input_processor.detokenize(request.token_ids, "token_ids"))

    def _tenant(self, context: Context) -> str:
        metadata = metadata_of(context)
        return scheduling_hints(metadata, self._keys.check(metadata.get("authorization"))).tenant

    async def _generate(
        self,
        requests: Sequence[inference_pb2.GenerateRequest],
        metadata: Mapping[str, str],
        context: Context,
        trace: CallTrace,
        write: Write,
        entry: CallEntry,
    ) -> None:
        """One coroutine, no generator: a cancelled call unwinds all of it at once."""
        note = entry.note
        note.model = requests[0].model or self._input_processor.model_name
        note.request_id = requests[0].request_id
        tenant = self._keys.check(metadata.get("authorization"))
        hints = scheduling_hints(metadata, tenant)
        note.tenant = hints.tenant
        account = self._input_processor.rates.begin(
            self._keys.account(metadata.get("authorization"), hints.tenant), hints.tenant
        )
        time_left = context.time_remaining()
        if time_left is not None and time_left <= 0:
            raise DeadlineExceeded("the call's deadline passed before it began")
        plan = [
            await self._prepared(
                request,
                CallInfo(
                    model=request.model,
                    request_id=request.request_id,
                    arrived_at=entry.arrived_at,
                    timeout_s=time_left or 0.0,
                    trace=trace,
                    scheduling=hints,
                    cache_salt=request.cache_salt,
                ),
            )
            for request in requests
        ]
        account.charge(sum(request.num_input_tokens for request in plan))
        entry.answers_begin()
        note.request_id = plan[0].request_id
        starts: dict[int, inference_pb2.Start] = {i: start_of(item, self._router_name) for i, item in enumerate(plan)}
        async with WriteWatch(self._write_timeout_s) as watch, self._input_processor.start(plan, entry) as outputs:
            try:
                async for index, delta in outputs:
                    watch.begin()
                    response = response_of(plan[index].request_id, delta, starts.pop(index, None))
                    await write(index, response)
                    watch.end()
            finally:
                account.charge(outputs.num_output_tokens)

    async def _prepared(self, request: inference_pb2.GenerateRequest, info: CallInfo) -> Request:
        processor = self._input_processor
        prepared = await processor.prepare(
            prompt_of(request, processor.core.max_prompt_tokens()),
            sampling_params(request.sampling, processor.defaults),
            info,
            options=PromptOptions(bad_words=tuple(request.sampling.bad_words)),
        )
        if not request.HasField("resume"):
            return prepared
        seed = request.sampling.seed if request.sampling.HasField("seed") else None
        return await processor.resumed(prepared, resume_of(request.resume), seed)

    def _check_batch(self, requests: Sequence[inference_pb2.GenerateRequest]) -> None:
        limit = self._max_choices
        if not 0 < len(requests) <= limit:
            raise InvalidRequest(
                f"requests must have 1 to {limit} entries, got {len(requests)}",
                field="requests",
                limit=limit,
                value=len(requests),
            )
        if any(request.HasField("resume") for request in requests):
            raise InvalidRequest("requests: an answer that is resumed has a call of its own", field="requests")
        if len({self._catalog.find(request.model) for request in requests}) > 1:
            raise InvalidRequest("requests: they name several models, a batch is of one", field="requests")
        named = [request.request_id for request in requests if request.request_id]
        if len(set(named)) < len(named):
            raise InvalidRequest("requests: two have the same request_id", field="requests")


def server_options(limits: LimitSettings) -> tuple[tuple[str, int], ...]:
    """gRPC's own options that bound what a client may send and hold."""
    return (
        ("grpc.max_receive_message_length", limits.max_grpc_message_bytes),
        ("grpc.max_concurrent_streams", limits.max_grpc_streams),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
    )
