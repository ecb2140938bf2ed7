"""tandem.v1.InferenceService, with prompts as token ids."""

from __future__ import annotations

import time

import grpc
import grpc.aio

from loadtest.clients.base import Call, CauseLine, RequestFailed, TargetInfo, failed
from loadtest.clients.target import Target
from loadtest.records import FailureCause, Reply, TtftSplit
from shared.errors import ConfigError
from shared.rpc.convert import finish_reason_from_proto
from shared.rpc.errors import ERROR_TRAILER
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from shared.rpc.server import channel

_STATUS_TIMEOUT_S = 10.0
_SPLIT_FIELDS = tuple(TtftSplit.__dataclass_fields__)
_CAUSES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: FailureCause.OVERLOADED,
    grpc.StatusCode.DEADLINE_EXCEEDED: FailureCause.DEADLINE,
    grpc.StatusCode.INVALID_ARGUMENT: FailureCause.REJECTED,
    grpc.StatusCode.NOT_FOUND: FailureCause.REJECTED,
    grpc.StatusCode.UNAUTHENTICATED: FailureCause.REJECTED,
    grpc.StatusCode.PERMISSION_DENIED: FailureCause.REJECTED,
    grpc.StatusCode.UNIMPLEMENTED: FailureCause.REJECTED,
}


class GrpcClient:
    """A Client for a Tandem router."""

    def __init__(self, target: Target, model: str = "", api_key: str = "") -> None:
        """`model`: empty = the model that the router serves."""
        self._target = target
        self._model = model
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel: grpc.aio.Channel | None = None
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub | None = None

    def connect(self) -> None:
        """Makes the channel; `start` does so too, and asks whether the router serves."""
        self._channel = channel(self._target.address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def start(self) -> TargetInfo:
        """Asks the router for its status; raises ConfigError (`target`) if it cannot serve yet."""
        self.connect()
        status = await self.status()
        if not status.ready:
            raise ConfigError(
                f"{self._target} is not ready: {status.not_ready_reason or 'no reason given'}", field="target"
            )
        return TargetInfo(self._model or status.model_name)

    async def status(self, window_s: float = 0.0) -> inference_pb2.ClusterStatus:
        """The router's status, its figures over the last `window_s` seconds; raises RequestFailed."""
        assert self._stub is not None, "start() comes first"
        request = inference_pb2.GetStatusRequest(window_s=window_s)
        try:
            return await self._stub.GetStatus(request, metadata=self._metadata, timeout=_STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _failure(error, num_messages=0) from error

    def encode(self, call: Call) -> inference_pb2.GenerateRequest:
        """The message to send."""
        sampling = types_pb2.SamplingParams(temperature=0.0, max_tokens=call.max_tokens, ignore_eos=call.ignore_eos)
        return inference_pb2.GenerateRequest(
            request_id=call.request_id,
            model=call.model or self._model,
            tokens=inference_pb2.TokenIds(ids=call.token_ids),
            sampling=sampling,
        )

    async def generate(self, payload: inference_pb2.GenerateRequest, reply: Reply) -> None:
        """See Client."""
        assert self._stub is not None, "start() comes first"
        reply.sent_s = time.perf_counter()
        stream = self._stub.Generate(payload, metadata=self._metadata)
        try:
            while isinstance(message := await stream.read(), inference_pb2.GenerateResponse):
                at_s = time.perf_counter()
                if message.token_ids:
                    reply.add_tokens(at_s, list(message.token_ids))
                if message.finish_reason:
                    _take_end(reply, message)
        except grpc.aio.AioRpcError as error:
            raise _failure(error, len(reply.token_times_s)) from error
        finally:
            reply.closed_s = time.perf_counter()
            if not stream.done():
                stream.cancel()
        if not reply.finish_reason:
            raise failed(FailureCause.DISCONNECTED, "the stream ended before the answer did")
        if not reply.token_times_s:
            raise failed(FailureCause.PROTOCOL, "the answer has no tokens")

    async def causes(self, window_s: float) -> tuple[CauseLine, ...]:
        """See Client."""
        try:
            status = await self.status(min(max(window_s, 1.0), 3600.0))
        except RequestFailed:
            return ()
        return tuple(
            CauseLine(share.cause, share.num_lost, share.lost_share, share.time_share) for share in status.window.causes
        )

    async def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            connection, self._channel = self._channel, None
            await connection.close()


def _take_end(reply: Reply, message: inference_pb2.GenerateResponse) -> None:
    reason = finish_reason_from_proto(message.finish_reason)
    reply.finish_reason = reason.value if reason else "unknown"
    reply.num_prompt_tokens = message.usage.num_prompt_tokens
    reply.num_output_tokens = message.usage.num_output_tokens
    reply.num_cached_tokens = message.usage.num_cached_tokens
    reply.prefill_worker = message.prefill_worker
    reply.decode_worker = message.decode_worker
    if message.HasField("ttft"):
        reply.split = TtftSplit(**{name: getattr(message.ttft, name) for name in _SPLIT_FIELDS})


def _failure(error: grpc.aio.AioRpcError, num_messages: int) -> RequestFailed:
    """The cause of a status; Tandem's typed error if the trailer has one."""
    code, message = error.code(), error.details() or error.code().name
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_TRAILER and isinstance(value, bytes):
            typed = types_pb2.Error.FromString(value)
            return failed(_CAUSES.get(code, FailureCause.SERVER_ERROR), typed.message, typed.kind)
    if code is grpc.StatusCode.UNAVAILABLE:
        unreachable = not num_messages and "connect" in message.lower()
        return failed(FailureCause.UNREACHABLE if unreachable else FailureCause.DISCONNECTED, message, code.name)
    return failed(_CAUSES.get(code, FailureCause.SERVER_ERROR), message, code.name)
