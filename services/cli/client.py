"""A small asynchronous client of tandem.v1.InferenceService; typed errors instead of gRPC statuses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType

import grpc
import grpc.aio

from shared.errors import TandemError, WorkerLost
from shared.rpc.errors import ERROR_TRAILER, from_rpc_error
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from shared.rpc.server import channel


class InferenceClient:
    """One connection to a router, used as an asynchronous context manager. Calls may run concurrently."""

    def __init__(self, target: str, api_key: str = "") -> None:
        """`target` is host:port of the router's gRPC API; an empty `api_key` sends none."""
        self._target = target
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> InferenceClient:
        self._channel = channel(self._target)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            open_channel, self._channel = self._channel, None
            await open_channel.close()

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Streams the answer; closing the iterator early cancels the request in the whole cluster.

        Raises the error that the cluster reported, WorkerLost if nothing answers at the target,
        DeadlineExceeded after `timeout_s` seconds.
        """
        call = self._stub().Generate(request, metadata=self._metadata, timeout=timeout_s)
        answered = False
        try:
            async for response in call:
                answered = True
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._typed(error, answered) from error
        finally:
            call.cancel()

    async def status(self, timeout_s: float = 10.0) -> inference_pb2.ClusterStatus:
        """The cluster as the router sees it; raises like `generate`."""
        call = self._stub().GetStatus(inference_pb2.GetStatusRequest(), metadata=self._metadata, timeout=timeout_s)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._typed(error, answered=False) from error

    async def explain(self, request_id: str, timeout_s: float = 10.0) -> inference_pb2.Explanation:
        """Why a request was placed as it was; raises like `generate`, NotFound where the router does not know it."""
        request = inference_pb2.ExplainRequest(request_id=request_id)
        try:
            return await self._stub().Explain(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._typed(error, answered=False) from error

    def _stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        assert self._channel is not None, "use the client in `async with`"
        return inference_pb2_grpc.InferenceServiceStub(self._channel)

    def _typed(self, error: grpc.aio.AioRpcError, answered: bool) -> TandemError:
        """The cluster's own error if the call carries one, else one derived from the gRPC status."""
        from_cluster = any(key == ERROR_TRAILER for key, _ in error.trailing_metadata() or ())
        if from_cluster or error.code() != grpc.StatusCode.UNAVAILABLE:
            return from_rpc_error(error, self._target)
        if answered:
            return WorkerLost(f"the connection to {self._target} broke in the middle of the answer")
        return WorkerLost(f"nothing listens at {self._target}: start a cluster with `tandem up`")
