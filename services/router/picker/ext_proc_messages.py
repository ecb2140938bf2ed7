"""The messages of Envoy's ext-proc protocol, as the endpoint picker protocol uses them.

Source: the public definition of envoy.service.ext_proc.v3, and proposal 004 (endpoint picker protocol, version 1.0) of
the Gateway API Inference Extension.
"""

from __future__ import annotations

from collections.abc import Sequence

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from services.router.edge.http.errors import error_headers, error_json
from shared.errors import TandemError

DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
ECHOED = (ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.GRPC)
"""Body modes in which the processor sends every chunk on; in the others it lets the proxy continue."""


def headers_of(headers: HeaderMap) -> dict[str, str]:
    """By lower-case name; of a name that stands twice the first counts, as on the router's own edge."""
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
    """The same list as a header and as metadata."""
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
