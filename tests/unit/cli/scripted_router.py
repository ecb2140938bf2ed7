"""A real gRPC server that answers InferenceService calls by script."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from shared.errors import NotFound, TandemError
from shared.rpc.errors import ERROR_TRAILER, to_proto
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2


def answer_responses() -> list[inference_pb2.GenerateResponse]:
    """ "Hello, world" in three tokens, with everything that a last message carries."""
    return [
        inference_pb2.GenerateResponse(request_id="r-1", text="Hello", token_ids=[11]),
        inference_pb2.GenerateResponse(request_id="r-1", text=", wor", token_ids=[12]),
        inference_pb2.GenerateResponse(
            request_id="r-1",
            text="ld",
            token_ids=[13],
            finish_reason=types_pb2.FINISH_REASON_STOP,
            usage=types_pb2.Usage(num_prompt_tokens=9, num_output_tokens=3, num_cached_tokens=4),
            ttft=types_pb2.TtftSplit(
                queue_ms=0.5,
                placement_ms=1.0,
                prefill_compute_ms=7.0,
                return_ms=0.5,
                ttft_ms=10.0,
                ship_exposed_ms=0.25,
                first_decode_step_ms=2.0,
            ),
            prefill_worker="prefill-0",
            decode_worker="decode-1",
        ),
    ]


@dataclass
class ScriptedRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with those of `responses` that the client has not, then with `error` where there is one; keeps what it
    was asked."""

    responses: list[inference_pb2.GenerateResponse] = field(default_factory=answer_responses)
    error: TandemError | None = None
    breaks: bool = False  # ends with UNAVAILABLE and no typed error, as a lost connection does
    breaks_after: int = 0  # so does a first call, after this many responses; 0 = it does not
    status_fails: bool = True  # `error` and `breaks` hold for GetStatus too
    status: inference_pb2.ClusterStatus = field(default_factory=inference_pb2.ClusterStatus)
    remembers: tuple[str, ...] = ()  # requests that it explains
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    target: str = ""

    def __post_init__(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(4))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.breaks_after and not request.HasField("resume"):
            yield from self.responses[: self.breaks_after]
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        num_had = len(request.resume.token_ids)
        yield from self.responses[num_had:]
        self._fail(context)

    def GetStatus(  # noqa: N802
        self, request: inference_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ClusterStatus:
        if self.status_fails:
            self._fail(context)
        return self.status

    def Explain(  # noqa: N802
        self, request: inference_pb2.ExplainRequest, context: grpc.ServicerContext
    ) -> inference_pb2.Explanation:
        if request.request_id not in self.remembers:
            self.error = NotFound(f"request {request.request_id} is not remembered here")
            self._fail(context)
        return inference_pb2.Explanation(request_id=request.request_id)

    def _fail(self, context: grpc.ServicerContext) -> None:
        if self.breaks:
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        if self.error is not None:
            context.set_trailing_metadata(((ERROR_TRAILER, to_proto(self.error).SerializeToString()),))
            context.abort(getattr(grpc.StatusCode, self.error.grpc_code), self.error.message)
