"""The picker's gRPC service and its messages: one stream for each request of the gateway.

Source: the public definition of envoy.service.ext_proc.v3, and proposal 004 (endpoint picker protocol, version 1.0) of
the Gateway API Inference Extension.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from services.router.edge.http.errors import error_headers, error_json
from services.router.picker.picker import Picker, subset_of
from shared.errors import InvalidRequest, TandemError

DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
ECHOED = (ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.GRPC)
"""Body modes in which the processor sends every chunk on; in the others it lets the proxy continue."""


def headers_of(headers: HeaderMap) -> dict[str, str]:
    """The headers by lower-case name; of a name that stands twice the first counts, as on the router's own edge."""
    found: dict[str, str] = {}
    for header in headers.headers:
        value = header.raw_value.decode("latin-1") if header.raw_value else header.value
        found.setdefault(header.key.lower(), value)
    return found


def subset_value(request: ext_proc.ProcessingRequest) -> object:
    """What the proxy hints at, None = nothing."""
    hint = request.metadata_context.filter_metadata.get(SUBSET_NAMESPACE)
    return MessageToDict(hint).get(SUBSET) if hint is not None else None


def destination(endpoints: Sequence[str]) -> tuple[ext_proc.HeaderMutation, Struct]:
    """The list of endpoints, as a header and as metadata."""
    value = ",".join(endpoints)
    header = HeaderValueOption(
        header=HeaderValue(key=DESTINATION, raw_value=value.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    metadata = Struct()
    metadata.update({DESTINATION_NAMESPACE: {DESTINATION: value}})
    return ext_proc.HeaderMutation(set_headers=[header]), metadata


def headers_response(
    kind: str, mutation: ext_proc.HeaderMutation | None = None, metadata: Struct | None = None
) -> ext_proc.ProcessingResponse:
    """`kind`: request_headers or response_headers."""
    common = ext_proc.CommonResponse(header_mutation=mutation)
    return ext_proc.ProcessingResponse(**{kind: ext_proc.HeadersResponse(response=common)}, dynamic_metadata=metadata)


def body_response(kind: str, body: ext_proc.HttpBody, *, echo: bool) -> ext_proc.ProcessingResponse:
    """`kind`: request_body or response_body. The body is not changed."""
    common = ext_proc.CommonResponse()
    if echo:
        chunk = common.body_mutation.streamed_response
        chunk.body, chunk.end_of_stream = body.body, body.end_of_stream
        chunk.end_of_stream_without_message = body.end_of_stream_without_message
        chunk.grpc_message_compressed = body.grpc_message_compressed
    return ext_proc.ProcessingResponse(**{kind: ext_proc.BodyResponse(response=common)})


def trailers_response(kind: str) -> ext_proc.ProcessingResponse:
    """`kind`: request_trailers or response_trailers."""
    return ext_proc.ProcessingResponse(**{kind: ext_proc.TrailersResponse()})


def immediate(error: TandemError, status: int) -> ext_proc.ProcessingResponse:
    """The proxy answers the client itself, with the body that a router would have sent."""
    headers = [(b"content-type", b"application/json"), *error_headers(error)]
    mutation = ext_proc.HeaderMutation(
        set_headers=[
            HeaderValueOption(header=HeaderValue(key=name.decode(), raw_value=value)) for name, value in headers
        ]
    )
    answer = ext_proc.ImmediateResponse(headers=mutation, body=error_json(error), details=f"tandem_{error.code}")
    answer.status.code = status
    return ext_proc.ProcessingResponse(immediate_response=answer)


logger = logging.getLogger(__name__)

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"
"""Names of the endpoint picker protocol for health checks."""
TOO_LARGE_STATUS = 413


class ExternalProcessor(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]  # has no types
    """Answers with the routers at a request's headers, and lets bodies pass as they come: none is held here."""

    def __init__(self, picker: Picker, max_body_bytes: int, count: Callable[[str], None]) -> None:
        """`count` gets each outcome: picked, or the code of the error that the client gets."""
        self._picker = picker
        self._max_body_bytes = max_body_bytes
        self._count = count

    def register(self, server: grpc.aio.Server) -> None:
        """Adds it to a server."""
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self, server)

    async def Process(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[ext_proc.ProcessingRequest],
        _: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        """One response a request, until an immediate one ends it."""
        exchange = _Exchange(self._picker, self._max_body_bytes)
        async for request in request_iterator:
            try:
                response = exchange.answer(request)
            except TandemError as error:
                self._count(error.code)
                status = TOO_LARGE_STATUS if isinstance(error, _TooLargeError) else error.http_status
                yield immediate(error, status)
                return
            if exchange.has_just_picked:
                self._count("picked")
            if response is not None:
                yield response


class _TooLargeError(InvalidRequest):
    """The body is longer than a router would read."""


class _Exchange:
    """One HTTP request and its answer."""

    def __init__(self, picker: Picker, max_body_bytes: int) -> None:
        self._picker = picker
        self._max_body_bytes = max_body_bytes
        self._num_body_bytes = 0
        # A proxy that does not say its modes is taken for one in the mode that the picker protocol demands.
        self._echoes_request = self._echoes_response = True
        self.has_just_picked = False

    def answer(self, request: ext_proc.ProcessingRequest) -> ext_proc.ProcessingResponse | None:
        """None for a message of a kind that is not known. Raises TandemError: what the client gets."""
        self.has_just_picked = False
        if request.HasField("protocol_config"):
            self._echoes_request = request.protocol_config.request_body_mode in ECHOED
            self._echoes_response = request.protocol_config.response_body_mode in ECHOED
        kind = request.WhichOneof("request")
        if kind == "request_headers":
            return self._pick(request)
        if kind == "request_body":
            self._count_body(len(request.request_body.body))
            return body_response(kind, request.request_body, echo=self._echoes_request)
        if kind == "response_headers":
            return headers_response(kind)
        if kind == "response_body":
            return body_response(kind, request.response_body, echo=self._echoes_response)
        if kind in ("request_trailers", "response_trailers"):
            return trailers_response(kind)
        return None

    def _pick(self, request: ext_proc.ProcessingRequest) -> ext_proc.ProcessingResponse:
        headers = headers_of(request.request_headers.headers)
        length = headers.get("content-length", "")
        if length.isascii() and length.isdecimal():
            self._check_size(int(length))
        endpoints = self._picker.pick(headers, subset_of(subset_value(request)))
        self.has_just_picked = True
        mutation, metadata = destination(endpoints)
        logger.debug("request %s goes to %s", headers.get("x-request-id", ""), endpoints)
        return headers_response("request_headers", mutation, metadata)

    def _count_body(self, num_bytes: int) -> None:
        self._num_body_bytes += num_bytes
        self._check_size(self._num_body_bytes)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise _TooLargeError(
                f"the body is longer than {self._max_body_bytes} bytes", field="body", limit=self._max_body_bytes
            )
