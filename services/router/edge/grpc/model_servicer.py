"""Several models over gRPC: each has a servicer of its own; the model that a request names says which one serves it."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from services.router.edge.grpc.inference_messages import Context
from services.router.edge.grpc.servicer import InferenceServicer
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc


class ModelServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Forwards every call; the chosen servicer does authentication, limits and errors."""

    def __init__(self, servicer_of: Callable[[str], InferenceServicer]) -> None:
        """`servicer_of(name)`: the servicer of the model of that name; of the first for no name or an unknown one."""
        self._servicer_of = servicer_of

    def register(self, server: grpc.aio.Server) -> None:
        """What `RpcServer` takes as `register`."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Generate(  # type: ignore[override]  # noqa: N802  # as InferenceServicer's
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Served by the request's model."""
        await self._servicer_of(request.model).Generate(request, context)

    async def GenerateBatch(  # type: ignore[override]  # noqa: N802  # likewise
        self, request: inference_pb2.GenerateBatchRequest, context: Context
    ) -> None:
        """Served by the first request's model; its servicer refuses a batch with others."""
        name = request.requests[0].model if request.requests else ""
        await self._servicer_of(name).GenerateBatch(request, context)

    async def Warm(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.Warmed:
        """Served by the request's model."""
        return await self._servicer_of(request.model).Warm(request, context)

    async def CloseSession(  # noqa: N802
        self, request: inference_pb2.CloseSessionRequest, context: Context
    ) -> inference_pb2.ClosedSession:
        """Served by the request's model."""
        return await self._servicer_of(request.model).CloseSession(request, context)

    async def ExpectSession(  # noqa: N802
        self, request: inference_pb2.ExpectSessionRequest, context: Context
    ) -> inference_pb2.ExpectedSession:
        """Served by the request's model."""
        return await self._servicer_of(request.model).ExpectSession(request, context)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Served by the request's model."""
        return await self._servicer_of(request.model).Tokenize(request, context)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Served by the request's model."""
        return await self._servicer_of(request.model).Detokenize(request, context)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """See `InferenceService`: all models of the router."""
        return await self._servicer_of("").ListModels(request, context)

    async def GetRequest(  # noqa: N802
        self, request: inference_pb2.GetRequestRequest, context: Context
    ) -> inference_pb2.RequestInfo:
        """Whichever model it is for."""
        return await self._servicer_of("").GetRequest(request, context)

    async def GetStatus(  # noqa: N802
        self, request: inference_pb2.GetStatusRequest, context: Context
    ) -> inference_pb2.ClusterStatus:
        """The status of all models."""
        return await self._servicer_of("").GetStatus(request, context)

    async def Explain(  # noqa: N802
        self, request: inference_pb2.ExplainRequest, context: Context
    ) -> inference_pb2.Explanation:
        """Whichever model it was for."""
        return await self._servicer_of("").Explain(request, context)
